"""A model registry in a directory: each model has a history of versions, and the last one is current.

A version is a file that is never changed. The history is one small file that is replaced as a whole, and nothing counts
but what it names: a version is published when it is added there, and taken back when it is removed. So what was current
before is current again then, byte for byte, for nobody has touched it.

    <MODEL_REGISTRY>/<model>/history.json     ["<key>", "<key>"], the oldest first
    <MODEL_REGISTRY>/<model>/<key>.npz

``MODEL_REGISTRY`` says where it is; without it, it is ``models`` in Airflow's home.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

Version = dict[str, str | None]
"""``key``, ``sha256`` of its file, and ``replaced``, the key of what was current before it, if anything was."""


class Busy(Exception):
    """Somebody else is changing this model just now; nothing was done."""


def publish(model: str, content: bytes, *, key: str) -> Version:
    """Make a content the current version, under a key; the same key again finds what it has published.

    :raises Busy: nothing was published.
    """
    with _locked(model):
        history = _history(model)
        if key not in history:
            _write(_file(model, key), content)
            history.append(key)
            _write(_place(model) / "history.json", json.dumps(history).encode())
            _sweep(model, history)
        return _version(model, key, history)


def find(model: str, key: str) -> Version | None:
    """The version that was published under a key; None: none was, or it was taken back."""
    history = _history(model)
    return _version(model, key, history) if key in history else None


def take_back(model: str, *, key: str) -> None:
    """Remove one version, and no other: if it was current, the one before it is current again.

    :raises Busy: nothing was removed.
    """
    with _locked(model):
        history = _history(model)
        if key in history:
            history.remove(key)
            _write(_place(model) / "history.json", json.dumps(history).encode())
        _sweep(model, history)


def current(model: str) -> bytes | None:
    """The content of the current version; None before the first."""
    history = _history(model)
    return _file(model, history[-1]).read_bytes() if history else None


# -- files -------------------------------------------------------------------------------------------------------


def _place(model: str) -> Path:
    home = os.environ.get("AIRFLOW_HOME", "~/airflow")
    root = os.environ.get("MODEL_REGISTRY") or Path(home) / "models"
    return Path(root).expanduser() / model


def _file(model: str, key: str) -> Path:
    return _place(model) / f"{key}.npz"


def _history(model: str) -> list[str]:
    try:
        return list(json.loads((_place(model) / "history.json").read_bytes()))
    except FileNotFoundError:
        return []


def _partial(path: Path) -> Path:
    """What a file is called while it is written."""
    return path.with_name(f".{path.name}")


def _version(model: str, key: str, history: list[str]) -> Version:
    at = history.index(key)
    digest = hashlib.sha256(_file(model, key).read_bytes()).hexdigest()
    return {"key": key, "sha256": digest, "replaced": history[at - 1] if at else None}


def _write(path: Path, content: bytes) -> None:
    """The whole content is there under this name or none of it, whenever the process or the machine stops."""
    with _partial(path).open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    _partial(path).replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _sweep(model: str, history: list[str]) -> None:
    """Remove what was taken back, and what a process that was killed had written and not published."""
    for path in _place(model).iterdir():
        if path.suffix == ".npz" and path.stem not in history:
            path.unlink()


@contextmanager
def _locked(model: str) -> Iterator[None]:
    """One at a time; the system lets go of the lock when its process dies, however it dies."""
    place = _place(model)
    place.mkdir(parents=True, exist_ok=True)
    with (place / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as taken:
            raise Busy(f"somebody else is changing {model} just now") from taken
        yield
