"""The layers of the package, read from its imports: they go down only, and only the top one knows Airflow.

An import counts wherever it stands, also inside a function or under TYPE_CHECKING: what a layer may not know, it may
not know for its types either. Each rule is also tried on a small tree that breaks it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "airflow_saga"


@dataclass(frozen=True)
class Layer:
    """What the modules of one layer may import: layers of ours, and packages that are not in the standard library."""

    rank: int
    parts: frozenset[str]
    third_party: frozenset[str] | None  # None: any, except what `forbidden` names
    forbidden: frozenset[str] = frozenset()


NO_INPUT_OUTPUT = frozenset(
    {"asyncio", "http", "selectors", "socket", "sqlite3", "ssl", "subprocess", "urllib"}
)
LAYERS = {
    "core": Layer(0, frozenset({"core"}), frozenset(), NO_INPUT_OUTPUT),
    "store": Layer(1, frozenset({"store"}), frozenset({"alembic", "psycopg", "psycopg_pool", "sqlalchemy"})),
    "runtime": Layer(2, frozenset({"runtime"}), None, frozenset({"airflow", "alembic", "pydantic_ai"})),
    "airflow": Layer(
        3,
        frozenset(
            {
                "",
                "ai",
                "capsules",
                "cli",
                "dags",
                "decorators",
                "doctor",
                "get_provider_info",
                "graph",
                "metadata",
                "operators",
                "platform",
                "plugin",
                "questions",
                "settings",
                "telling",
                "telemetry",
                "trigger",
                "upkeep",
                "verbs",
            }
        ),
        None,
    ),
}
VAGUE_NAMES = frozenset({"base", "helper", "helpers", "manager", "managers", "misc", "util", "utils"})
# Capitals anywhere in a text, or small letters where a text begins with them: prose does neither.
SQL = re.compile(
    r"\bSELECT\b.*\bFROM\b|\bINSERT INTO\b|\bUPDATE\s+\S+\s+SET\b|\bDELETE FROM\b|\bCREATE (TABLE|SCHEMA|INDEX)\b"
    r"|\bALTER TABLE\b|\bDROP (TABLE|SCHEMA)\b|\bTRUNCATE\b|^\s*(LISTEN|NOTIFY)\s"
    r"|^\s*(select\b.*\bfrom\b|insert into\b|update\s+\S+\s+set\b|delete from\b|create table\b|alter table\b)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    tree: ast.Module

    @property
    def part(self) -> str:
        """The name right below the package, empty for the package itself."""
        return self.name.partition(".")[2].partition(".")[0]


def modules(root: Path) -> list[Module]:
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        names = path.relative_to(root).with_suffix("").parts
        name = ".".join(names[:-1] if names[-1] == "__init__" else names)
        found.append(Module(name, path, ast.parse(path.read_text(), str(path))))
    return found


def imports(module: Module, known: frozenset[str]) -> Iterator[tuple[str, int]]:
    """Each imported module's full name with its line; `from a import b` is `a.b` where that is a module of ours."""
    package = module.name if module.path.stem == "__init__" else module.name.rpartition(".")[0]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                source = ".".join([*above, *([source] if source else [])])
            for alias in node.names:
                whole = f"{source}.{alias.name}"
                yield (whole if whole in known else source), node.lineno
        elif isinstance(node, ast.Call) and _callee(node) in ("import_module", "__import__"):
            yield from ((text, node.lineno) for text in _texts(node.args))


def _callee(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _texts(nodes: list[ast.expr]) -> list[str]:
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def layer_of(part: str) -> Layer | None:
    return next((layer for layer in LAYERS.values() if part in layer.parts), None)


def import_violations(root: Path) -> list[str]:
    found = modules(root)
    known = frozenset(module.name for module in found)
    wrong = []
    for module in found:
        layer = layer_of(module.part)
        if layer is None:
            wrong.append(f"{module.name}: in no layer; say in LAYERS which one it belongs to")
            continue
        for name, line in imports(module, known):
            reason = _forbidden(layer, name)
            if reason:
                wrong.append(f"{module.name}:{line} imports {name}: {reason}")
    return wrong


def _forbidden(layer: Layer, name: str) -> str | None:
    top, _, rest = name.partition(".")
    if top == PACKAGE:
        target = layer_of(rest.partition(".")[0])
        return "a layer above" if target is None or target.rank > layer.rank else None
    if top in layer.forbidden:
        return "not for this layer"
    if layer.third_party is not None and top not in sys.stdlib_module_names | layer.third_party:
        return "neither in the standard library nor allowed to this layer"
    return None


def sql_violations(root: Path) -> list[str]:
    return [
        f"{module.name}:{node.lineno} holds SQL: {node.value.strip()[:60]!r}"
        for module in modules(root)
        if module.part != "store"
        for node in _texts_outside_docstrings(module.tree)
        if SQL.search(node.value)
    ]


def _texts_outside_docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
            yield node


def name_violations(root: Path, *folders: str) -> list[str]:
    return [
        str(path.relative_to(root))
        for folder in folders
        for path in sorted((root / folder).rglob("*"))
        if (path.suffix == ".py" or path.is_dir()) and VAGUE_NAMES & set(path.stem.lower().split("_"))
    ]


def test_imports_go_down_only_and_only_the_top_layer_knows_airflow() -> None:
    assert import_violations(ROOT) == []


def test_sql_has_one_home_the_store() -> None:
    assert sql_violations(ROOT) == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert name_violations(ROOT, PACKAGE, "dags", "tests") == []


@pytest.mark.parametrize("layer", ["core", "store", "runtime"])
def test_a_lower_layer_is_there_and_loads_without_airflow(layer: str) -> None:
    # Migrations are run by Alembic and cannot be imported outside of it.
    names = [m.name for m in modules(ROOT) if m.part == layer and "migrations" not in m.name.split(".")]
    assert names, f"there is no {PACKAGE}.{layer}"
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(sorted(name for name in sys.modules if name.partition('.')[0] == 'airflow'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *names], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("core/plan.py", "import psycopg"),
        ("core/plan.py", "from airflow_saga.store import log"),
        ("core/plan.py", "import socket"),
        ("core/plan.py", "def f():\n    from ..runtime import step"),
        ("core/plan.py", "from airflow_saga import SagaDAG"),
        ("store/log.py", "from airflow.sdk import DAG"),
        ("store/log.py", "from airflow_saga import runtime"),
        ("store/log.py", "import httpx"),
        ("runtime/step.py", "import airflow"),
        (
            "runtime/step.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from airflow.sdk import DAG",
        ),
        ("runtime/step.py", "import importlib\nimportlib.import_module('airflow.sdk')"),
        ("runtime/step.py", "from .. import operators"),
        ("runtime/step.py", "from airflow_saga.dags import SagaDAG"),
        ("unplaced.py", "import os"),
    ],
)
def test_an_import_that_goes_up_is_found(tmp_path: Path, path: str, source: str) -> None:
    _tree(tmp_path, {path: source})
    assert len(import_violations(tmp_path)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "core/plan.py",
            "import json\nfrom airflow_saga.core import states\nfrom . import states\nfrom .states import X",
        ),
        ("store/log.py", "import psycopg\nfrom airflow_saga.core.states import X\nfrom ..core import states"),
        ("runtime/step.py", "import numpy\nfrom airflow_saga import store\nfrom ..store.log import X"),
        ("operators/saga.py", "from airflow.sdk import DAG\nfrom airflow_saga import runtime, __version__"),
    ],
)
def test_an_import_that_goes_down_is_let_through(tmp_path: Path, path: str, source: str) -> None:
    _tree(tmp_path, {path: source})
    assert import_violations(tmp_path) == []


@pytest.mark.parametrize(
    "source",
    [
        'QUERY = "SELECT id\\nFROM saga"',
        'QUERY = f"select id from {table}"',
        'connection.execute("UPDATE saga SET state = 1")',
        'connection.execute("LISTEN saga")',
    ],
)
def test_sql_outside_the_store_is_found_and_in_it_is_not(tmp_path: Path, source: str) -> None:
    _tree(tmp_path, {"runtime/step.py": source, "store/log.py": source})
    assert [each.partition(":")[0] for each in sql_violations(tmp_path)] == [f"{PACKAGE}.runtime.step"]


def test_prose_is_not_taken_for_sql(tmp_path: Path) -> None:
    prose = "Select a step from the list, then update what was set."
    _tree(tmp_path, {"runtime/step.py": f'"""{prose} SELECT x FROM y"""\nTEXT = "{prose}"'})
    assert sql_violations(tmp_path) == []


def test_a_name_that_says_nothing_is_found(tmp_path: Path) -> None:
    _tree(tmp_path, {"runtime/lease_manager.py": "", "runtime/utils/x.py": "", "runtime/managed.py": ""})
    assert name_violations(tmp_path, PACKAGE) == [
        f"{PACKAGE}/runtime/lease_manager.py",
        f"{PACKAGE}/runtime/utils",
    ]


def _tree(root: Path, files: dict[str, str]) -> None:
    skeleton = {f"{name}/__init__.py": "" for name in ("core", "store", "runtime", "operators")}
    for path, source in {"__init__.py": "", "core/states.py": "", **skeleton, **files}.items():
        file = root / PACKAGE / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
