"""The life of one call: received, landed (or not), answered (or not); each a line in the ledger.

The invariant: nothing counts before its line is written, and nobody is answered before it is on disk. One lock
guards everything; ``changed`` is notified at every event, so that ``/wait`` never polls. What the service was told
to do wrong is kept in memory only: a restarted service behaves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from .effects import Effects, Event, Outcome, Row
from .faults import HOLD_SECONDS, UNDO, Behaviour, Call, Rule, choose, parse_rule
from .ledger import LedgerFile

PRESENCE_SECONDS = 0.1
"""How often it is looked whether the client of a waiting call is still there."""


@dataclass
class Exchange:
    """One call on its way through the service."""

    world: World
    seq: int
    call: Call
    behaviour: Behaviour
    outcome: Outcome | None = None
    landed: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    lands_on_release: bool = True

    @property
    def fault(self) -> Rule | None:
        return self.behaviour.fault


@dataclass
class World:
    """One namespace: its effects, what it was told, and the calls it holds."""

    effects: Effects
    rules: list[Rule] = field(default_factory=list)
    exchanges: dict[int, Exchange] = field(default_factory=dict)
    over: bool = False


class Service:
    """All worlds of one process, over one ledger file."""

    def __init__(self, ledger: LedgerFile) -> None:
        self._ledger = ledger
        self._lock = threading.RLock()
        self._mark = 0
        self._numbers = 0
        self._rule_ids = 0
        self._worlds: dict[str, World] = {}
        self.changed = threading.Condition(self._lock)
        for event in ledger.read():
            self._numbers = max(self._numbers, event["n"])
            self._fold(event)
        with self._lock:
            self._go_on_after_an_earlier_life()

    def _go_on_after_an_earlier_life(self) -> None:
        for world in self._worlds.values():
            self._close_calls_of_an_earlier_life(world)
            for promise in world.effects.promises.values():
                if promise["status"] == "pending":
                    self._keep_promise_later(world, promise)

    def world(self, name: str) -> World:
        with self._lock:
            return self._worlds.setdefault(name, World(Effects(name)))

    # -- events -------------------------------------------------------------------------------------------------

    def _fold(self, event: Event) -> None:
        if event["event"] == "reset":
            self._worlds.pop(event["world"], None)
        else:
            self.world(event["world"]).effects.fold(event)

    def _record(self, world: World, event: Event) -> int:
        """Number, write and fold one event; the caller holds the lock. Returns its number (0: the world is over)."""
        if world.over:
            return 0
        self._numbers += 1
        stamped = {"n": self._numbers, "world": world.effects.name, "at": _now(), **event}
        self._mark = self._ledger.append(stamped)
        self._fold(stamped)
        self.changed.notify_all()
        return self._numbers

    def _sync(self) -> None:
        self._ledger.sync(self._mark)

    def _close_calls_of_an_earlier_life(self, world: World) -> None:
        for row in list(world.effects.rows.values()):
            if row["answered_seq"] is None:
                self._record(world, _answered(row["seq"], None, "service killed", None, False, "gone"))

    # -- a call -------------------------------------------------------------------------------------------------

    def receive(self, name: str, call: Call) -> Exchange:
        """Write the call down and choose how it will be treated."""
        with self._lock:
            world = self.world(name)
            trip, of = call.trip, call.of
            if call.verb == UNDO and (target := world.effects.target(call)) is not None:
                trip, of = target.trip, target.key
            call = Call(**{**vars(call), "trip": trip, "of": of})
            behaviour = choose(world.rules, call, time.monotonic())
            shown = {name: value for name, value in vars(call).items() if name not in ("digest", "token")}
            fault = behaviour.fault.do if behaviour.fault else None
            exchange = Exchange(world, self._numbers + 1, call, behaviour)
            world.exchanges[exchange.seq] = exchange
            self._record(world, {"event": "received", **shown, "fault": fault})
        return exchange

    def land(self, exchange: Exchange) -> Outcome:
        """Let the effect of the call happen now; what it comes to is decided in the same instant."""
        with self._lock:
            world = exchange.world
            outcome = world.effects.decide(exchange.seq, exchange.call, exchange.behaviour)
            if outcome.event is not None:
                self._record(world, outcome.event)
                if outcome.event["event"] == "promised":
                    self._keep_promise_later(world, outcome.event)
            exchange.outcome = outcome
        self._sync()
        exchange.landed.set()
        return outcome

    def land_later(self, exchange: Exchange, seconds: float) -> None:
        """Let the effect happen after so many seconds, whether or not anybody still waits for it."""
        self._after(seconds, lambda: self.land(exchange))

    def answer(self, exchange: Exchange, status: int | None, heard: str, body: Any, client: str) -> None:
        """Write down what is about to be answered; called before the answer leaves."""
        replay = exchange.outcome is not None and exchange.outcome.replay
        with self._lock:
            self._record(exchange.world, _answered(exchange.seq, status, heard, body, replay, client))
            exchange.world.exchanges.pop(exchange.seq, None)
        self._sync()

    def client_left(self, exchange: Exchange) -> None:
        with self._lock:
            if exchange.world.effects.rows[exchange.seq]["client"] != "gone":
                self._record(exchange.world, {"event": "gone", "call": exchange.seq})

    # -- promises -----------------------------------------------------------------------------------------------

    def _keep_promise_later(self, world: World, promise: dict[str, Any]) -> None:
        token = promise["token"]
        if promise["due"] is None:
            return
        self._after(max(0.0, promise["due"] - time.time()), lambda: self._keep_promise(world, token))

    def _keep_promise(self, world: World, token: str) -> None:
        with self._lock:
            promise = world.effects.promises.get(token)
            if promise is None or promise["status"] != "pending":
                return
            ids = {"call": promise["call"], "id": promise["id"]}
            if promise["outcome"] == "failed":
                self._record(world, {"event": "broken", "token": token, **ids})
            else:
                self._record(world, {"event": "landed", "delta": -1, "promise": token, **ids})
        self._sync()

    @staticmethod
    def _after(seconds: float, call: Callable[[], Any]) -> None:
        timer = threading.Timer(seconds, call)
        timer.daemon = True
        timer.start()

    # -- what a test says and asks ------------------------------------------------------------------------------

    def tell(self, name: str, told: Any) -> dict[str, Any]:
        with self._lock:
            self._rule_ids += 1
            rule = parse_rule(told, self._rule_ids)
            self.world(name).rules.append(rule)
        return rule.shown()

    def told(self, name: str) -> list[dict[str, Any]]:
        with self._lock:
            return [rule.shown() for rule in self.world(name).rules]

    def forget(self, name: str, rule_id: int | None) -> int:
        """Forget one rule, or all; calls that are held already stay held."""
        with self._lock:
            world = self.world(name)
            kept = [rule for rule in world.rules if rule_id is not None and rule.id != rule_id]
            forgotten = len(world.rules) - len(kept)
            world.rules = kept
        return forgotten

    def release(
        self, name: str, kind: str | None, key: str | None, verb: str | None, land: bool
    ) -> list[int]:
        """Let held calls go on, and keep promises that have no date; returns the numbers of the calls."""
        with self._lock:
            world = self.world(name)
            let_go = []
            for exchange in world.exchanges.values():
                held = exchange.fault is not None and exchange.fault.hears in ("hold", "stall")
                row = world.effects.rows[exchange.seq]
                if held and not exchange.released.is_set() and _fits(row, kind, key, verb):
                    exchange.lands_on_release = land
                    exchange.released.set()
                    let_go.append(exchange.seq)
            for promise in list(world.effects.promises.values()):
                open_ended = promise["due"] is None and promise["status"] == "pending"
                if open_ended and land and _fits(world.effects.rows[promise["call"]], kind, key, verb):
                    self._keep_promise(world, promise["token"])
                    let_go.append(promise["call"])
        return let_go

    def reset(self, name: str) -> None:
        """Forget a world; what it still holds is dropped without landing."""
        with self._lock:
            self.release(name, None, None, None, land=False)
            world = self.world(name)
            self._record(world, {"event": "reset"})
            world.over = True
        self._sync()

    def calls(self, name: str, **wanted: str | None) -> list[Row]:
        with self._lock:
            return [dict(row) for row in self.world(name).effects.calls(**wanted)]

    def net(self, name: str, kind: str | None, trip: str | None) -> dict[str, Any]:
        with self._lock:
            return self.world(name).effects.net(kind, trip)

    def wait(self, name: str, event: str, n: int, seconds: float, **wanted: str | None) -> int:
        """Wait, bounded, until n calls of those wanted were received, landed, answered or left; returns how many."""
        happened = HAPPENED[event]

        def count() -> int:
            return sum(map(happened, self.world(name).effects.calls(**wanted)))

        with self.changed:
            self.changed.wait_for(lambda: count() >= n, timeout=seconds)
            return count()


HAPPENED: dict[str, Callable[[Row], bool]] = {
    "received": lambda row: True,
    "landed": lambda row: row["landed_seq"] is not None,
    "answered": lambda row: row["answered_seq"] is not None,
    "gone": lambda row: row["client"] == "gone",
}


def _fits(row: Row, kind: str | None, key: str | None, verb: str | None) -> bool:
    of_kind, of_verb = kind in (None, "*", row["kind"]), verb in (None, "*", row["verb"])
    return of_kind and of_verb and key in (None, row["key"], row["of"])


def hold_seconds(fault: Rule) -> float:
    return fault.seconds or HOLD_SECONDS


def _answered(call: int, status: int | None, heard: str, body: Any, replay: bool, client: str) -> Event:
    return {
        "event": "answered", "call": call, "status": status, "heard": heard, "answer": body,
        "replay": replay, "client": client,
    }  # fmt: skip


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
