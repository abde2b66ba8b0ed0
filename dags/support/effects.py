"""What stands in one world, folded from the events of its ledger.

``Effects`` never changes by itself: it decides what a call would do (an ``Outcome``, which may carry an event) and it
folds events. So the state after a SIGKILL is the state of the events that were written, and nothing else. A world
knows three verbs: forward (an effect lands, +1), undo (it is taken back, -1) and lookup (what became of a key).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .faults import FORWARD, LOOKUP, UNDO, Behaviour, Call

Event = dict[str, Any]
Row = dict[str, Any]

CANNOT_BE_UNDONE = ("messages",)


@dataclass
class Effect:
    """One change of the world: a booking, a charge, a message."""

    id: str
    kind: str
    key: str | None
    trip: str | None
    body: Any
    digest: str
    at: float
    big: int = 0
    standing: bool = True

    def shown(self) -> dict[str, Any]:
        status = "standing" if self.standing else "undone"
        return {
            **as_object(self.body),
            "id": self.id,
            "kind": self.kind,
            "key": self.key,
            "trip": self.trip,
            "status": status,
        }


@dataclass(frozen=True)
class Outcome:
    """What a call comes to: the answer, and the event that makes it true (none: the world does not change)."""

    status: int
    body: dict[str, Any]
    event: Event | None = None
    replay: bool = False
    big: int = 0


class Effects:
    """One world: its calls, its effects, and the undos it has promised for later."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: dict[int, Row] = {}
        self.effects: dict[str, Effect] = {}
        self.promises: dict[str, dict[str, Any]] = {}
        self._by_key: dict[tuple[str, str], list[str]] = {}
        self._undone: dict[tuple[str, str], str] = {}
        self._undo_order: list[dict[str, Any]] = []
        self._in_flight: dict[tuple[str, str, str], int] = {}
        self._most_in_flight: dict[tuple[str, str, str], int] = {}

    # -- fold ---------------------------------------------------------------------------------------------------

    def fold(self, event: Event) -> None:
        """Take one event in, be it new or read back from the ledger's file."""
        fold: Callable[[Event], None] = getattr(self, f"_fold_{event['event']}")
        fold(event)

    def _fold_received(self, event: Event) -> None:
        row = {name: value for name, value in event.items() if name not in ("event", "world", "n")}
        self.rows[event["n"]] = {
            **row, "seq": event["n"], "landed": 0, "landed_seq": None, "landed_at": None, "status": None,
            "heard": None, "answer": None, "replay": False, "answered_seq": None, "answered_at": None,
            "client": None, "gone_at": None, "promise": None,
        }  # fmt: skip
        if event["key"] is not None:
            place = (event["verb"], event["kind"], event["key"])
            self._in_flight[place] = self._in_flight.get(place, 0) + 1
            self._most_in_flight[place] = max(self._most_in_flight.get(place, 0), self._in_flight[place])

    def _fold_landed(self, event: Event) -> None:
        row = self.rows[event["call"]]
        row["landed"] += event["delta"]
        row["landed_seq"], row["landed_at"] = event["n"], event["at"]
        if event["delta"] > 0:
            effect = Effect(**event["effect"])
            self.effects[effect.id] = effect
            row["id"] = effect.id
            if effect.key is not None:
                self._by_key.setdefault((effect.kind, effect.key), []).append(effect.id)
            return
        effect = self.effects[event["id"]]
        effect.standing = False
        row.update(id=effect.id, of=effect.key, trip=effect.trip)
        if row["key"] is not None:
            self._undone[effect.kind, row["key"]] = effect.id
        if token := event.get("promise"):
            self.promises[token]["status"] = "settled"
        self._undo_order.append({"kind": effect.kind, "id": effect.id, "key": effect.key, "seq": event["n"]})

    def _fold_promised(self, event: Event) -> None:
        names = ("token", "id", "due", "outcome", "call")
        self.promises[event["token"]] = {"status": "pending", **{name: event[name] for name in names}}
        row = self.rows[event["call"]]
        row["promise"], row["id"] = event["token"], event["id"]
        if row["key"] is not None:
            self._undone[row["kind"], row["key"]] = event["id"]

    def _fold_broken(self, event: Event) -> None:
        self.promises[event["token"]]["status"] = "failed"
        effect = self.effects[event["id"]]
        self._undone = {place: done for place, done in self._undone.items() if done != effect.id}

    def _fold_answered(self, event: Event) -> None:
        row = self.rows[event["call"]]
        for name in ("status", "heard", "answer", "replay", "client"):
            row[name] = event[name]
        row["answered_seq"], row["answered_at"] = event["n"], event["at"]
        if row["key"] is not None:
            self._in_flight[row["verb"], row["kind"], row["key"]] -= 1

    def _fold_gone(self, event: Event) -> None:
        row = self.rows[event["call"]]
        row["client"] = "gone"
        row["gone_at"] = row["gone_at"] or event["at"]

    # -- decide -------------------------------------------------------------------------------------------------

    def target(self, call: Call) -> Effect | None:
        """Find what an undo speaks of: by id, else by the key it was made under (the oldest that stands)."""
        if call.id is not None:
            effect = self.effects.get(call.id)
            return effect if effect and effect.kind == call.kind else None
        made = [self.effects[each] for each in self._by_key.get((call.kind, call.of or ""), [])]
        return next((effect for effect in made if effect.standing), made[-1] if made else None)

    def decide(self, seq: int, call: Call, behaviour: Behaviour) -> Outcome:
        """Say what the call comes to if it takes effect now."""
        if call.verb == FORWARD:
            return self._decide_forward(seq, call, behaviour)
        if call.verb == UNDO:
            return self._decide_undo(seq, call, behaviour)
        return self._decide_lookup(call, behaviour)

    def _decide_forward(self, seq: int, call: Call, behaviour: Behaviour) -> Outcome:
        made = self._by_key.get((call.kind, call.key), []) if call.key is not None else []
        if made and not behaviour.has("ignore_keys"):
            effect = self.effects[made[0]]
            if effect.digest != call.digest:
                return Outcome(
                    422, {"error": f"key {call.key} was used for another request", "id": effect.id}
                )
            return Outcome(200, effect.shown(), replay=True, big=effect.big)
        big = behaviour.manners["big"].told["bytes"] if behaviour.has("big") else 0
        effect = Effect(
            id=f"{call.kind}-{seq}", kind=call.kind, key=call.key, trip=call.trip, body=call.body,
            digest=call.digest, at=time.time(), big=big,
        )  # fmt: skip
        event = {"event": "landed", "call": seq, "delta": +1, "effect": vars(effect).copy()}
        return Outcome(201, effect.shown(), event, big=big)

    def _decide_undo(self, seq: int, call: Call, behaviour: Behaviour) -> Outcome:
        if call.kind in CANNOT_BE_UNDONE:
            return Outcome(405, {"error": f"{call.kind} cannot be unsent"})
        effect = self.target(call)
        careless = behaviour.has("ignore_keys")
        before = self._undone.get((call.kind, call.key)) if call.key is not None and not careless else None
        if before is not None:
            if effect is None or effect.id != before:
                return Outcome(422, {"error": f"undo key {call.key} was used for {before}"})
            return self._repeated(effect)
        if effect is None or not (effect.standing or careless):
            absent = {"status": "absent", "id": call.id, "key": call.of}
            return Outcome(200 if behaviour.has("missing_ok") else 404, absent)
        if self._promise_of(effect, "pending") is not None and not careless:
            return self._repeated(effect)
        if behaviour.has("later"):
            return self._promise(seq, effect, behaviour)
        event = {"event": "landed", "call": seq, "delta": -1, "id": effect.id}
        return Outcome(200, {**effect.shown(), "status": "undone"}, event)

    def _promise(self, seq: int, effect: Effect, behaviour: Behaviour) -> Outcome:
        told = behaviour.manners["later"].told
        seconds = told.get("seconds")
        event = {
            "event": "promised",
            "call": seq,
            "token": f"undo-{seq}",
            "id": effect.id,
            "due": None if seconds is None else time.time() + seconds,
            "outcome": told.get("outcome", "settled"),
        }
        return Outcome(202, {"status": "pending", "token": event["token"], "id": effect.id}, event)

    def _promise_of(self, effect: Effect, status: str | None = None) -> dict[str, Any] | None:
        of_it = [each for each in self.promises.values() if each["id"] == effect.id]
        return next((each for each in reversed(of_it) if status in (None, each["status"])), None)

    def _repeated(self, effect: Effect) -> Outcome:
        """Answer an undo whose key was seen: as before, with what has become of a promise since."""
        promise = self._promise_of(effect)
        if promise is None:
            return Outcome(200, {**effect.shown(), "status": "undone"}, replay=True)
        status = 202 if promise["status"] == "pending" else 200
        body = {"status": promise["status"], "token": promise["token"], "id": effect.id}
        return Outcome(status, body, replay=True)

    def _decide_lookup(self, call: Call, behaviour: Behaviour) -> Outcome:
        fault = behaviour.fault
        hears = fault.hears if fault else "answer"
        if call.id is not None:
            if call.id in self.promises:
                promise = self.promises[call.id]
                return Outcome(200, {name: promise[name] for name in ("token", "id", "status")})
            made = [self.effects[call.id]] if call.id in self.effects else []
        else:
            made = [self.effects[each] for each in self._by_key.get((call.kind, call.key or ""), [])]
        made = [effect for effect in made if effect.kind == call.kind]
        if hears == "unknown":
            return Outcome(200, {"key": call.key, "landed": None, "standing": None, "effect": None})
        if fault and hears == "lag":
            made = [effect for effect in made if time.time() - effect.at >= fault.seconds]
        if call.id is not None and not made:
            return Outcome(404, {"error": f"no {call.kind} {call.id}"})
        standing = [effect for effect in made if effect.standing]
        chosen = standing[0] if standing else made[-1] if made else None
        found = {"key": call.key, "landed": bool(made), "standing": len(standing)}
        return Outcome(200, {**found, "effect": chosen.shown() if chosen else None})

    # -- report -------------------------------------------------------------------------------------------------

    def calls(self, **wanted: str | None) -> Iterator[Row]:
        """Give the calls whose fields equal those wanted (``None`` and ``*`` match all)."""
        for row in list(self.rows.values()):
            if all(value in (None, "*", row[name]) for name, value in wanted.items()):
                yield row

    def net(self, kind: str | None = None, trip: str | None = None) -> dict[str, Any]:
        """Add up: forward effects that landed minus undos that landed, per kind and per key."""
        kinds: dict[str, int] = {}
        keys: dict[str, dict[str, dict[str, Any]]] = {}
        rows = [row for row in self.calls(kind=kind, trip=trip) if row["verb"] != LOOKUP]
        for row in rows:
            kinds[row["kind"]] = kinds.get(row["kind"], 0) + row["landed"]
            key = row["key"] if row["verb"] == FORWARD else row["of"]
            entry = keys.setdefault(row["kind"], {}).setdefault(key or "", _no_calls())
            entry["net"] += row["landed"]
            entry["calls" if row["verb"] == FORWARD else "undo_calls"] += 1
            entry["landed" if row["verb"] == FORWARD else "undone"] += abs(row["landed"])
            if row["verb"] == UNDO and row["key"] not in (None, *entry["undo_keys"]):
                entry["undo_keys"].append(row["key"])
            place = (row["verb"], row["kind"], row["key"])
            entry["most_in_flight"] = max(entry["most_in_flight"], self._most_in_flight.get(place, 1))
        ids = {row["id"] for row in rows}
        return {
            "total": sum(kinds.values()),
            "kinds": kinds,
            "keys": keys,
            "undo_order": [each for each in self._undo_order if each["id"] in ids],
            "standing": [each.shown() for each in self.effects.values() if each.standing and each.id in ids],
            "promises": [each for each in self.promises.values() if each["id"] in ids],
        }


def as_object(body: Any) -> dict[str, Any]:
    """Give a request's body as an object, so that an answer can carry it."""
    return body if isinstance(body, dict) else {"body": body}


def _no_calls() -> dict[str, Any]:
    return {
        "net": 0, "calls": 0, "undo_calls": 0, "landed": 0, "undone": 0, "undo_keys": [], "most_in_flight": 0
    }  # fmt: skip
