"""The built wheel, installed into an environment of its own: what users get, and not this checkout.

It owns `.run/`, which git ignores. Both the wheel and the environment are kept under a hash of what went into them, so
that a second run finds them, a changed source file makes new ones, and two test runs at once share or do not meet.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / ".run"
PACKAGE = ROOT / "airflow_saga"
CONSTRAINTS = ROOT / "constraints" / f"constraints-{sys.version_info[0]}.{sys.version_info[1]}.txt"
BUILD_FILES = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")
UNUSED_AFTER_SECONDS = 6 * 3600.0
COMMAND_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the wheel and its dependencies in it."""

    directory: Path

    @property
    def bin(self) -> Path:
        return self.directory / "bin"

    @property
    def python(self) -> Path:
        return self.bin / "python"

    @property
    def airflow(self) -> Path:
        return self.bin / "airflow"


def build_wheel() -> Path:
    """Build the wheel of the sources as they are now, unless that was done before, and return its path."""
    with _locked("wheels"):
        place = _place("wheels", _hash(_sources()))
        if not any(place.glob("*.whl")):
            _build_into(place)
        (wheel,) = place.glob("*.whl")
        return wheel


def wheel_environment(*, extras: Iterable[str] = ("embedded",), packages: Iterable[str] = ()) -> Environment:
    """The wheel with its pinned dependencies in an environment of its own, which nothing of this checkout is in.

    :param extras: the extras of the distribution to install with it.
    :param packages: more to install, for the DAGs of a test; pinned by the same constraints.
    """
    wheel = build_wheel()
    requirement = f"airflow-saga[{','.join(sorted(extras))}] @ {wheel.as_uri()}"
    wanted = [requirement, *sorted(packages)]
    with _locked("environments"):
        place = _place("environments", _hash([CONSTRAINTS, Path(sys.executable).resolve()], wanted))
        if not (place / "complete").exists():
            shutil.rmtree(place)
            _run("venv", "--quiet", "--python", sys.executable, str(place))
            environment = Environment(place)
            pins = ("--constraint", str(CONSTRAINTS))
            # Else many processes that start at the same time would all compile the same files.
            flags = ("--quiet", "--compile-bytecode", "--python", str(environment.python))
            _run("pip", "install", *flags, *pins, *wanted)
            (place / "complete").touch()
        return Environment(place)


def _build_into(place: Path) -> None:
    """Build from a copy: a build in the checkout would take along what an earlier one left in its `build/`."""
    with tempfile.TemporaryDirectory(prefix="saga-wheel-") as scratch:
        for name in BUILD_FILES:
            if (ROOT / name).exists():
                shutil.copy2(ROOT / name, scratch)
        shutil.copytree(PACKAGE, Path(scratch, PACKAGE.name), ignore=shutil.ignore_patterns("__pycache__"))
        _run(
            "build",
            "--quiet",
            "--wheel",
            "--python",
            sys.executable,
            "--no-build-isolation",
            "-o",
            str(place),
            scratch,
        )


def _sources() -> list[Path]:
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return sorted(files) + [ROOT / name for name in BUILD_FILES if (ROOT / name).exists()]


def _hash(files: Iterable[Path], words: Iterable[str] = ()) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    for word in words:
        digest.update(f"{word}\0".encode())
    return digest.hexdigest()[:16]


def _place(kind: str, key: str) -> Path:
    """The directory for a key, marked as used now; those that nobody has used for hours go away."""
    place = RUN / kind / key
    place.mkdir(parents=True, exist_ok=True)
    os.utime(place)
    for other in place.parent.iterdir():
        if other.is_dir() and time.time() - other.stat().st_mtime > UNUSED_AFTER_SECONDS:
            shutil.rmtree(other)
    return place


@contextmanager
def _locked(kind: str) -> Iterator[None]:
    RUN.mkdir(exist_ok=True)
    with (RUN / f"{kind}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(*arguments: str) -> None:
    command = [sys.executable, "-m", "uv", *arguments]
    # Not in the checkout, where uv would take this project's settings and environment for what is meant.
    done = subprocess.run(
        command,
        cwd=RUN,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_SECONDS,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
