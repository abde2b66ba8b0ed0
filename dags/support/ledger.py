"""The ledger's file: one JSON object per line, only ever appended, on disk before anybody is answered.

A line that was cut off by a kill in the middle of a write is dropped when the file is read back: nobody was told of it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


class LedgerFile:
    """Append events; ``sync`` lets many callers share one fsync."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._written = 0
        self._synced = 0
        self._syncing = threading.Lock()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._cut_torn_line(path)
            self._file = path.open("ab")

    @staticmethod
    def _cut_torn_line(path: Path) -> None:
        if not path.exists():
            return
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)

    def read(self) -> Iterator[dict[str, Any]]:
        """Give the events of earlier lives, oldest first."""
        if self._path is not None:
            with self._path.open("rb") as lines:
                for line in lines:
                    yield json.loads(line)

    def append(self, event: dict[str, Any]) -> int:
        """Write one event (the caller holds the service's lock); returns the mark to sync up to."""
        if self._file is not None:
            self._file.write(json.dumps(event, ensure_ascii=True).encode() + b"\n")
            self._file.flush()
        self._written += 1
        return self._written

    def sync(self, mark: int) -> None:
        """Return when every event up to the mark is on disk."""
        if self._file is None:
            return
        with self._syncing:
            if self._synced >= mark:
                return
            reached = self._written
            os.fsync(self._file.fileno())
            self._synced = reached
