"""The three runs of `make demo-agent`: a concierge that is let be, one that is stopped, and one that is killed.

Each has a script of its own for the model, and a third witness beside the saga store and the travel service: the ledger
of the model's server, which says what it was asked and when a client left.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from airflow_saga.core.states import ActionState, SagaState
from airflow_saga.store.reader import SagaView

from .demo_runs import RUN_SECONDS, Run

DAG_ID = "concierge_agent"
TASK_ID = "concierge"
CHUNK_SECONDS = 0.1
FAREWELL = (
    "Your flight to Lisbon leaves at ten past seven, it is paid, and I have told you so by message. "
    "Bring something light for the day and something warm for the evening, and have a good journey."
)


def _calls(name: str, **arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"name": name, "arguments": arguments}]}


def _script(run: Run, *, tells: bool) -> None:
    turns = [
        {"text": "Let me look at the flights.", **_calls("search", to="LIS")},
        _calls("book", flight="LIS-0710", trip=run.trip),
        _calls("pay", amount="129.00", trip=run.trip),
        *([_calls("notify", text="Your flight is booked.", trip=run.trip)] if tells else []),
        {"text": FAREWELL},
    ]
    run.stack.model.script(run.trip, {"turns": turns, "chunk_seconds": CHUNK_SECONDS})


def _begin(run: Run) -> None:
    conf = {"trip": run.trip, "wish": "a morning flight to Lisbon", "model": f"openai-chat:{run.trip}"}
    run.stack.api.trigger(run.dag_id, run.run_id, conf)


def _in_the_farewell(run: Run, turn: int) -> None:
    """Wait until the model is in the middle of its last answer."""

    def look() -> bool:
        asked = run.stack.model.requests(run.trip)
        return bool(asked) and asked[-1]["turn"] == turn and asked[-1]["chunks"] > 5

    run.stack.wait_for(look, RUN_SECONDS, f"the model says good-bye to {run.trip}")


def complete(run: Run) -> None:
    """Let it be."""
    _script(run, tells=True)
    _begin(run)
    view = run.wait_for_state(SagaState.COMPLETED)
    run.say("COMPLETED: searched, booked, paid, told")
    run.expect("net effect", {"flights": 1, "payments": 1, "messages": 1}, _kinds(run))
    run.expect("requests to the model", 5, len(run.stack.model.requests(run.trip)))
    run.expect("recorded requests", 5, sum(a.name == "model_request" for a in view.actions))
    run.seen += [
        "Each request to the model and each call of a tool is an action of one step. The tools are declared with what",
        "undoes them (`search` reads, `book` and `pay` can be undone, `notify` cannot); a tool that nobody declared",
        "would be refused before it runs.",
    ]


def stop(run: Run) -> None:
    """Mark the run failed while the model is talking."""
    _script(run, tells=False)
    _begin(run)
    _in_the_farewell(run, turn=3)
    run.say("booked and paid; the model is in the middle of its last sentence: the run is marked failed")
    run.stack.api.mark_failed(run.dag_id, run.run_id)
    view = run.wait_for_state(SagaState.CANCELLED)
    asked = view.requests[0].asked_at.timestamp()
    left = run.stack.model.requests(run.trip)[-1]["client_left"]
    run.expect("the client left in the middle of the stream", True, left is not None)
    waited = (left or time.time()) - asked
    run.say(f"CANCELLED: the stream was closed {waited * 1000:.0f} ms after the undo was asked for")
    run.expect("net effect", {"flights": 0, "payments": 0}, _kinds(run))
    net = run.stack.travel.net(run.trip)
    run.expect("order of the undo", ["payments", "flights"], [each["kind"] for each in net["undo_order"]])
    cut = [action for action in view.actions if action.name == "model_request"][-1]
    run.expect("the request that was cut", ActionState.FAILED, cut.state)
    run.expect("its words are kept", True, FAREWELL[:20] in (cut.result or ""))
    run.seen += [
        f"The model's server saw its client leave {waited * 1000:.0f} ms after the undo was asked for. What had come",
        "in by then is kept, with what it cost as far as anybody can tell. Then the payment was refunded, and the",
        "flight cancelled: newest first.",
    ]


def kill(run: Run) -> None:
    """Kill the task's process while the model is talking."""
    _script(run, tells=False)
    _begin(run)
    _in_the_farewell(run, turn=3)
    pid = _pid(run)
    run.say(f"booked and paid; process {pid} is killed with SIGKILL in the middle of the last sentence")
    os.kill(pid, signal.SIGKILL)
    view = run.wait_for_state(SagaState.COMPLETED)
    turns = [row["turn"] for row in run.stack.model.requests(run.trip)]
    run.say("COMPLETED by the next try, which asked the model for its last answer only")
    run.expect("turns that the model was asked for", [0, 1, 2, 3, 3], turns)
    run.expect("net effect", {"flights": 1, "payments": 1}, _kinds(run))
    calls = [
        each["calls"] for keys in run.stack.travel.net(run.trip)["keys"].values() for each in keys.values()
    ]
    run.expect("calls of each tool", [1, 1], calls)
    run.expect("undo requests", 0, len(view.requests))
    run.seen += [
        "The process was killed without a word. The next try of the task told the conversation again from the log:",
        "no tool was called a second time, and the model was asked only for the answer that was never finished.",
    ]


def _kinds(run: Run) -> dict[str, int]:
    return dict(run.stack.travel.net(run.trip)["kinds"])


def _pid(run: Run) -> int:
    view: SagaView | None = run.view()
    assert view is not None
    pid = view.steps[0].pid
    assert pid is not None
    return pid


RUNS = (
    (complete, DAG_ID, "agent-1-completes", "a concierge searches, books, pays and tells the customer"),
    (stop, DAG_ID, "agent-2-stopped", "stopped in the middle of a sentence"),
    (kill, DAG_ID, "agent-3-killed", "killed in the middle of a sentence"),
)
