"""What the travel service can be told to do wrong, as data.

A fault is two answers to two independent questions: when does the effect *land* in the world, and what does the
caller *hear*? Every row of the table in ``travel_service`` is one pair. A manner is how the service always is
(ignores keys, refunds later, demands a token); manners compose with each other and with the one fault of a call.

Choosing: of the faults that match a call, those limited by ``times`` are used up first, in the order they were told
(so a script reads from top to bottom); else the newest unlimited one counts. Of each manner the newest counts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

Lands = Literal["now", "never", "release"] | float
"""When the effect lands: on receipt, never, when released, or that many seconds after receipt."""

FORWARD, UNDO, LOOKUP, ANY = "forward", "undo", "lookup", "*"
VERBS = (FORWARD, UNDO, LOOKUP)

HOLD_SECONDS = 60.0
"""How long a held request is kept when nobody releases it; then its connection is closed."""


@dataclass(frozen=True)
class Preset:
    """One word of the vocabulary: what it means where the teller says nothing more."""

    lands: Lands = "now"
    hears: str = "answer"
    needs: tuple[str, ...] = ()
    verb: str = FORWARD
    status: int | None = None
    may_land: tuple[str, ...] = ("now", "never", "seconds")


FAULTS: dict[str, Preset] = {
    "pass": Preset(may_land=("now",)),
    "delay": Preset(needs=("seconds",), may_land=("now", "seconds")),
    "late": Preset(needs=("seconds",), may_land=("seconds",)),
    "hold": Preset(hears="hold", may_land=("now", "never", "release")),
    "apply_and_drop": Preset(hears="close", may_land=("now", "seconds")),
    "drop": Preset(lands="never", hears="close"),
    "reset": Preset(lands="never", hears="reset"),
    "refuse": Preset(lands="never", hears="status", status=409, may_land=("never",)),
    "fail": Preset(lands="never", hears="status", status=500),
    "lie": Preset(lands="never", hears="lie", may_land=("never",)),
    "stall": Preset(hears="stall", may_land=("now", "never")),
    "dribble": Preset(hears="dribble", needs=("seconds",), may_land=("now",)),
    "garble": Preset(hears="garble", may_land=("now", "never")),
    "lag": Preset(hears="lag", needs=("seconds",), verb=LOOKUP, may_land=("now",)),
    "unknown": Preset(hears="unknown", verb=LOOKUP, may_land=("now",)),
}

MANNERS: dict[str, Preset] = {
    "ignore_keys": Preset(verb=ANY),
    "missing_ok": Preset(verb=UNDO),
    "later": Preset(verb=UNDO),
    "big": Preset(needs=("bytes",)),
    "token": Preset(needs=("token",), verb=ANY),
}

_FIELDS = {
    "do", "kind", "verb", "key", "trip", "times", "skip", "for_seconds",
    "seconds", "answer_after", "lands", "status", "retry_after", "bytes", "token", "outcome", "message",
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One request as it was understood: what it wants, of which kind, under which key."""

    method: str
    path: str
    verb: str
    kind: str
    key: str | None
    trip: str | None = None
    id: str | None = None
    of: str | None = None
    body: Any = None
    digest: str = ""
    token: str | None = None


@dataclass
class Rule:
    """One thing the service was told, with how often it has been used."""

    id: int
    do: str
    told: dict[str, Any]
    kind: str
    verb: str
    key: str | None
    trip: str | None
    times: int | None
    skip: int
    until: float | None
    lands: Lands
    hears: str
    seconds: float
    answer_after: float
    status: int
    seen: int = 0
    used: int = 0

    @property
    def is_manner(self) -> bool:
        return self.do in MANNERS

    def matches(self, call: Call, now: float) -> bool:
        """Say whether this rule speaks of the call; one that is used up or over speaks of none."""
        return (
            self.kind in (ANY, call.kind)
            and self.verb in (ANY, call.verb)
            and (self.key is None or self.key in (call.key, call.of))
            and (self.trip is None or self.trip == call.trip)
            and (self.times is None or self.used < self.times)
            and (self.until is None or now < self.until)
        )

    def shown(self) -> dict[str, Any]:
        hidden = {"token": "***"} if "token" in self.told else {}
        return {**self.told, **hidden, "id": self.id, "seen": self.seen, "used": self.used}


@dataclass(frozen=True)
class Behaviour:
    """What one call will meet: at most one fault, and each manner once."""

    fault: Rule | None = None
    manners: dict[str, Rule] = field(default_factory=dict)

    def has(self, manner: str) -> bool:
        return manner in self.manners


def parse_rule(told: Any, rule_id: int) -> Rule:
    """Read what was told.

    :raises ValueError: naming the field, when the words are not in the vocabulary.
    """
    if not isinstance(told, dict) or told.get("do") not in {**FAULTS, **MANNERS}:
        raise ValueError(f"'do' must be one of {', '.join([*FAULTS, *MANNERS])}; got {told!r}")
    do = told["do"]
    preset = {**FAULTS, **MANNERS}[do]
    if unknown := set(told) - _FIELDS:
        raise ValueError(
            f"{do}: unknown field {', '.join(sorted(unknown))}; known are {', '.join(sorted(_FIELDS))}"
        )
    if missing := [name for name in preset.needs if told.get(name) is None]:
        raise ValueError(f"{do} needs {' and '.join(missing)}")
    verb = told.get("verb", preset.verb)
    if verb not in (*VERBS, ANY):
        raise ValueError(f"{do}: verb must be forward, undo, lookup or *; got {verb!r}")
    seconds = float(told.get("seconds", 0) or 0)
    lands = _lands(do, preset, seconds if do == "late" else told.get("lands", preset.lands))
    over = told.get("for_seconds")
    return Rule(
        id=rule_id,
        do=do,
        told=told,
        kind=told.get("kind", ANY),
        verb=verb,
        key=told.get("key"),
        trip=None if told.get("trip") is None else str(told["trip"]),
        times=told.get("times"),
        skip=int(told.get("skip", 0)),
        until=None if over is None else time.monotonic() + float(over),
        lands=lands,
        hears=preset.hears,
        seconds=seconds,
        answer_after=float(told.get("answer_after", seconds if do == "delay" else 0)),
        status=int(told.get("status") or preset.status or 200),
    )


def _lands(do: str, preset: Preset, lands: Any) -> Lands:
    """Check when the effect lands; a pair that makes no sense (answer truthfully about nothing) is refused."""
    named = lands if isinstance(lands, str) else "seconds"
    if named not in preset.may_land or isinstance(lands, bool):
        raise ValueError(f"{do}: 'lands' may be {', '.join(preset.may_land)}; got {lands!r}")
    if isinstance(lands, str):
        return lands  # type: ignore[return-value]
    return float(lands)


def choose(rules: list[Rule], call: Call, now: float) -> Behaviour:
    """Pick the fault and the manners of a call, and count them as used."""
    matching = []
    for rule in rules:
        if rule.matches(call, now):
            rule.seen += 1
            if rule.seen > rule.skip:
                matching.append(rule)
    faults = [rule for rule in matching if not rule.is_manner]
    limited = [rule for rule in faults if rule.times is not None]
    fault = limited[0] if limited else faults[-1] if faults else None
    manners = {rule.do: rule for rule in matching if rule.is_manner}
    for rule in [*([fault] if fault else []), *manners.values()]:
        rule.used += 1
    return Behaviour(fault, manners)
