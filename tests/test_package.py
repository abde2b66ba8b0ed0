"""What a user installs: the wheel, its data files, and what Airflow finds in it."""

from __future__ import annotations

import configparser
import importlib.resources
import json
import os
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from airflow_saga.get_provider_info import get_provider_info
from tests.support.wheel import PACKAGE, ROOT, Environment, build_wheel, wheel_environment

PYTHONS = ("3.11", "3.12", "3.13")
SECOND_INSTALL_TIMEOUT_SECONDS = 600

# Run inside the environment of the wheel: loads whatever Airflow will load by name.
LOAD_EVERYTHING_NAMED = """
import importlib, importlib.metadata, json, sys
distribution = importlib.metadata.distribution("airflow-saga")
loaded = {}
for entry_point in distribution.entry_points:
    loaded[f"{entry_point.group}:{entry_point.name}"] = entry_point.load()
info = loaded["apache_airflow_provider:provider_info"]()
for name in [row["class-name"] for row in info["task-decorators"]] + info["cli"]:
    module, _, attribute = name.rpartition(".")
    loaded[name] = getattr(importlib.import_module(module), attribute)
import airflow_saga
print(json.dumps({"from": airflow_saga.__file__, "loaded": {name: repr(value) for name, value in loaded.items()}}))
"""


@pytest.fixture(scope="module")
def wheel() -> zipfile.ZipFile:
    return zipfile.ZipFile(build_wheel())


@pytest.fixture(scope="module")
def environment() -> Environment:
    return wheel_environment()


@pytest.fixture(scope="module")
def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    expected = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected


def test_the_package_has_its_data_files() -> None:
    suffixes = {path.suffix for path in PACKAGE.rglob("*") if path.is_file()}
    assert (PACKAGE / "py.typed").exists()
    assert ".sql" in suffixes
    assert list((PACKAGE / "store" / "migrations").rglob("*.py")), "no migrations in the store"


def test_the_wheel_carries_its_licence_and_its_metadata(wheel: zipfile.ZipFile) -> None:
    info = "airflow_saga-0.1.0.dist-info"
    metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    assert metadata["Name"] == "airflow-saga"
    assert "Apache-2.0" in (metadata["License-Expression"] or metadata["License"])
    assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert set(metadata.get_all("Provides-Extra")) == {"ai", "capsules", "celery", "dev", "embedded", "rag"}
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text().strip()


def test_the_provider_info_is_what_airflow_accepts() -> None:
    schema = json.loads(
        importlib.resources.files("airflow").joinpath("provider_info.schema.json").read_text()
    )
    jsonschema.validate(get_provider_info(), schema)


def test_the_provider_info_names_only_keys_that_airflow_knows() -> None:
    # The schema lets unknown keys pass, and Airflow then ignores them without a word.
    schema = json.loads(
        importlib.resources.files("airflow").joinpath("provider_info.schema.json").read_text()
    )
    option_keys = set(schema["definitions"]["option"]["properties"])
    info = get_provider_info()
    assert set(info) <= set(schema["properties"])
    assert all(set(option) <= option_keys for option in info["config"]["saga"]["options"].values())


@pytest.mark.parametrize(("name", "option"), get_provider_info()["config"]["saga"]["options"].items())
def test_an_option_has_a_default_of_its_type_and_says_its_unit(name: str, option: dict[str, Any]) -> None:
    kind = {"string": str, "integer": int, "float": float}[option["type"]]
    assert kind(option["default"]) is not None
    for suffix, unit in (
        ("_seconds", "seconds"),
        ("_ms", "milliseconds"),
        ("_bytes", "bytes"),
        ("_days", "days"),
    ):
        if name.endswith(suffix):
            assert unit in option["description"]


def test_asking_for_the_provider_info_loads_no_airflow() -> None:
    program = (
        "import sys; from airflow_saga.get_provider_info import get_provider_info; get_provider_info()\n"
        "print([name for name in sys.modules if name.partition('.')[0] == 'airflow'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.slow
@pytest.mark.timeout(SECOND_INSTALL_TIMEOUT_SECONDS)
def test_everything_that_is_named_in_the_installed_wheel_can_be_loaded(
    environment: Environment, tmp_path: Path
) -> None:
    found = json.loads(_run(environment, tmp_path, environment.python, "-c", LOAD_EVERYTHING_NAMED))
    assert Path(found["from"]).is_relative_to(environment.directory)
    assert set(found["loaded"]) == {
        "apache_airflow_provider:provider_info",
        "airflow.plugins:saga",
        "airflow_saga.decorators.saga.saga_task",
        "airflow_saga.cli.definition.get_saga_cli_commands",
    }


@pytest.mark.slow
@pytest.mark.timeout(SECOND_INSTALL_TIMEOUT_SECONDS)
def test_airflow_finds_the_provider_the_options_and_the_commands_of_the_installed_wheel(
    environment: Environment, tmp_path: Path
) -> None:
    listed = _run(environment, tmp_path, environment.airflow, "providers", "list", "-o", "json")
    # Airflow logs on its standard output; a name of ours that it cannot load is a warning there, and no more.
    assert "Exception when importing 'airflow_saga" not in listed
    versions = {row["package_name"]: row["version"] for row in json.loads(listed.splitlines()[-1])}
    assert versions["airflow-saga"] == "0.1.0"
    lease = _run(environment, tmp_path, environment.airflow, "config", "get-value", "saga", "lease_seconds")
    assert float(lease.splitlines()[-1]) == 15
    assert "migrate" in _run(environment, tmp_path, environment.airflow, "saga", "db", "--help")


@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_is_pinned_for_every_python(
    python: str, setup_cfg: configparser.ConfigParser
) -> None:
    lines = (ROOT / "constraints" / f"constraints-{python}.txt").read_text().splitlines()
    assert "make constraints" in "".join(lines[:2])
    pins = dict(line.split(" ;")[0].split("==") for line in lines if not line.startswith("#"))
    requirements = setup_cfg["options"]["install_requires"] + "\n".join(
        setup_cfg["options.extras_require"].values()
    )
    wanted = {_distribution(line) for line in requirements.splitlines() if line and not line.startswith("#")}
    assert wanted <= pins.keys()
    assert all(pins.values())


def test_each_supported_python_is_declared_once_in_each_place(setup_cfg: configparser.ConfigParser) -> None:
    classifiers = setup_cfg["metadata"]["classifiers"].splitlines()
    assert [line.rpartition(" ")[2] for line in classifiers if "Python :: 3." in line] == list(PYTHONS)
    assert {path.name for path in (ROOT / "constraints").glob("*.txt")} == {
        f"constraints-{p}.txt" for p in PYTHONS
    }
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert tools["mypy"]["python_version"] == PYTHONS[0]


def _distribution(requirement: str) -> str:
    name = requirement
    for mark in "[=><!~; ":
        name = name.partition(mark)[0]
    return name.strip()


def _run(environment: Environment, home: Path, *command: str | Path) -> str:
    """The standard output of a command in an empty directory, with none of this process's Airflow settings."""
    settings = {
        name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "PYTHON"))
    }
    done = subprocess.run(
        [str(part) for part in command],
        cwd=home,
        env={**settings, "AIRFLOW_HOME": str(home), "VIRTUAL_ENV": str(environment.directory)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
