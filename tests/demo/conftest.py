"""A bench for the steps of a demo DAG: processes that may be killed, on a saga store, with an undo for each run."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

from tests.demo.nursery import Child, Nursery
from tests.runtime.lab import Lab
from tests.support.world import View


class Bench:
    """One task of a DAG, on one saga store. A run is known by a name; ``calls`` counts what was called, by key."""

    def __init__(self, nursery: Nursery, url: str, dag_id: str, task_id: str, calls: Path) -> None:
        self.nursery = nursery
        self.task_id = task_id
        self.lab = Lab(url, View("http://127.0.0.1/nobody-is-there"), dag_id)
        self._url = url
        self._calls = calls

    def close(self) -> None:
        self.lab.close()

    def start(self, run: str, try_number: int = 1, **scenario: Any) -> Child:
        """One try of the task. ``die``: where, when and at which time; ``count``: what is counted."""
        return self._start("step", run_id=run, try_number=try_number, calls=str(self._calls), **scenario)

    def undo(self, run: str) -> str:
        """Undo a run in a process of its own; the state of its saga then."""
        decision = self.lab.ask_undo(run)
        assert decision.request is not None, decision.message
        request: uuid.UUID = decision.request.request_uuid
        self.lab.freeze(request)
        assert self._start("undo", request_uuid=str(request)).output["standing"] == 0
        settled = self.lab.settles.settle_if_all_settled(request, "undo1")
        assert settled is not None, "not everything is settled"
        return settled.saga.state

    def calls(self, place: str) -> Counter[str | None]:
        """How often a function was called with each key, in the order of the first calls."""
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        return Counter(call["key"] for call in map(json.loads, lines) if call["place"] == place)

    def _start(self, do: str, **scenario: Any) -> Child:
        return self.nursery.start(do, database_url=self._url, task_id=self.task_id, **scenario)
