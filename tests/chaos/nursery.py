"""Processes that carry out scenarios, and how they ended. See ``driver``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from pathlib import Path
from typing import Any

from tests.runtime.lab import wait_until

ROOT = Path(__file__).resolve().parents[2]


class Child:
    """One process: ``wait`` until it has ended, then ``ended`` and ``output`` say how, if it lived to say so."""

    def __init__(self, name: str, report: Path, log: Path) -> None:
        self.name = name
        self.pid = 0
        self.exit: int | None = None
        self._report = report
        self._log = log
        self._over = threading.Event()
        self._born = threading.Event()

    def wait(self, seconds: float = 60.0) -> Child:
        assert self._over.wait(seconds), f"{self.name} still runs after {seconds} s:\n{self.log}"
        return self

    @property
    def over(self) -> bool:
        return self._over.is_set()

    @property
    def killed(self) -> bool:
        return self.wait().exit == -signal.SIGKILL

    @property
    def said(self) -> dict[str, Any]:
        self.wait()
        if not self._report.exists():
            return {"ended": f"exit {self.exit}"}
        return dict(json.loads(self._report.read_text()))

    @property
    def ended(self) -> str:
        return str(self.said["ended"])

    @property
    def output(self) -> Any:
        said = self.said
        assert said["ended"] == "well", f"{said}\n{self.log}"
        return said["output"]

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def kill(self, signum: int = signal.SIGKILL) -> None:
        self._born.wait(10)
        os.kill(self.pid, signum)

    def stands_still(self) -> bool:
        """Whether it is stopped (SIGSTOP)."""
        if not self._born.wait(10) or self.over:
            return False
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def wait_until_it_stands_still(self) -> None:
        wait_until(lambda: self.over or self.stands_still(), f"{self.name} stands still", 30)
        assert not self.over, f"{self.said}\n{self.log}"


class Nursery:
    """Started once; ``start`` gives a process for a scenario."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="saga-nursery-"))
        self._children: dict[str, Child] = {}
        self._lock = threading.Lock()
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with (self.directory / "nursery.log").open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.driver"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, do: str, **scenario: Any) -> Child:
        name = uuid.uuid4().hex
        report, log = self.directory / f"{name}.json", self.directory / f"{name}.log"
        child = Child(f"{do} {scenario.get('die') or ''}", report, log)
        line = json.dumps({"id": name, "do": do, "report": str(report), "log": str(log), **scenario})
        with self._lock:
            self._children[name] = child
            assert self._process.stdin is not None
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        return child

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            child = self._children[said["id"]]
            if "pid" in said:
                child.pid = said["pid"]
                child._born.set()
            else:
                child.exit = said["exit"]
                child._over.set()

    def close(self) -> None:
        assert self._process.stdin is not None
        for child in self._children.values():
            if not child.over and child.stands_still():
                child.kill(signal.SIGCONT)
        self._process.stdin.close()
        self._process.wait(20)
        import shutil

        shutil.rmtree(self.directory, ignore_errors=True)
