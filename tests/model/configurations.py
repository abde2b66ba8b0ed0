"""The configurations that are explored: which steps and actions, and how often the environment may do what.

Each step is a word, each letter an action:
U compensable, with a verify probe; V compensable, without one; E idempotent, and its compensation copes with doubt;
N NON_COMPENSABLE; O READ_ONLY; M compensable, but its compensation is gone when the undo looks for it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Configuration:
    """``chain``: each step after the one before; else all beside each other. ``bounded``: A1 holds."""

    name: str
    steps: tuple[str, ...]
    budget: dict[str, int]
    chain: bool = True
    policy: str = "compensate"
    bounded: bool = True
    listener: bool = True
    halt: bool = False
    slow: bool = False
    """Too large for the everyday run."""


def _configuration(name: str, steps: str, budget: str, **options: object) -> Configuration:
    counts: dict[str, int] = {}
    for word in budget.split():
        what, _, count = word.partition("=")
        counts[what] = int(count or 1)
    return Configuration(name, tuple(steps.split()), counts, **options)  # type: ignore[arg-type]


CONFIGURATIONS: tuple[Configuration, ...] = (
    # One step.
    _configuration("crash", "U", "cancel crash retry"),
    _configuration("no probe", "V", "exception retry cancel"),
    _configuration("no probe, asked a person", "V", "exception retry cancel clear"),
    _configuration("reads around an action", "OUO", "exception retry cancel clear"),
    _configuration("reads, crash", "OU", "exception retry cancel crash"),
    _configuration("idempotent", "UE", "exception retry=2 crash cancel"),
    _configuration("idempotent, proves nothing happened", "E", "exception=2 retry=2 crash cancel"),
    _configuration("undo zombie", "UN", "undo_fails undo_zombie crash cancel"),
    _configuration("halt", "UU", "undo_fails cancel=2", halt=True),
    _configuration("undone again", "UU", "undo_fails cancel=2"),
    _configuration("later", "UU", "later undo_fails cancel=2"),
    _configuration("later, clear", "UU", "later cancel clear"),
    _configuration("unavailable", "UU", "unavailable undo_fails cancel"),
    _configuration("compensation is gone", "UM", "cancel=2 crash"),
    _configuration("task marked failed", "UU", "mark_task clear"),
    _configuration("task marked failed, no probe", "V", "mark_task clear exception cancel"),
    _configuration("two clears", "U", "clear=2 mark cancel"),
    _configuration("deadline", "UV", "expire crash cancel=2"),
    _configuration("deadline, undo zombie", "U", "expire cancel=2 undo_zombie undo_fails"),
    _configuration("slow listener", "U", "slow mark clear crash"),
    _configuration("keep, then undo", "U", "keep cancel crash"),
    _configuration("deadline, redo", "U", "expire cancel clear"),
    _configuration("deadline, only reads", "O", "expire cancel"),
    _configuration("mass outage", "U", "hold crash retry cancel clear"),
    # Steps in a chain.
    _configuration("chain: crash", "U U", "cancel crash retry"),
    _configuration("chain of three: crash", "U U U", "cancel crash"),
    _configuration("chain of three: clear", "U U U", "clear"),
    _configuration("chain: plain task cleared", "U U", "clear_plain crash retry cancel"),
    _configuration("chain: marked failed, clear", "U U", "mark clear"),
    _configuration("chain: marked failed, clear, no listener", "U U", "mark clear", listener=False),
    _configuration("chain: clear", "U V", "clear cancel"),
    _configuration("chain: keep, marked failed, clear", "U U", "keep mark clear"),
    _configuration("chain: undo zombie", "U U", "undo_zombie undo_fails cancel"),
    _configuration("chain: skipped", "U U", "skip=2 cancel"),
    _configuration("chain: task marked failed, run too", "U V", "mark_task mark"),
    _configuration("chain: mass outage", "U U", "hold crash cancel"),
    _configuration("chain: undone from a step", "U U", "place undo_fails cancel"),
    _configuration("chain: undone from a step, clear", "U U", "place clear"),
    _configuration("chain: undone from a step, late", "U U", "place crash retry"),
    # Steps beside each other.
    _configuration("pair: marked failed", "U N", "mark exception retry", chain=False),
    _configuration("pair: clear", "U E", "clear", chain=False),
    _configuration("pair: task marked failed", "U U", "mark_task", chain=False),
    _configuration("pair: on_failure=keep", "V E", "exception cancel", chain=False, policy="keep"),
    # A1 dropped: an effect may land at any time.
    _configuration("unbounded: idempotent", "E", "exception retry cancel crash", bounded=False),
    _configuration("unbounded: no probe", "V", "exception retry cancel crash", bounded=False),
    _configuration("unbounded: a probe says no too early", "U", "cancel", bounded=False),
    # Large.
    _configuration("reads around an action, crash", "OUO", "exception retry cancel clear crash", slow=True),
    _configuration("later, clear, undo fails", "UU", "later undo_fails cancel clear", slow=True),
    _configuration("chain: keep, clear", "U V", "keep clear cancel", slow=True),
    _configuration("chain: undo zombie, crash", "U U", "undo_zombie undo_fails crash cancel", slow=True),
    _configuration(
        "pair: on_failure=keep, retry", "V E", "exception retry cancel", chain=False, policy="keep", slow=True
    ),
    _configuration("chain: two actions, clear", "U UU", "cancel clear", slow=True),
    _configuration("two clears, exception", "U", "clear=2 mark cancel exception", slow=True),
    _configuration("chain: undo fails, clear", "U U", "undo_fails clear cancel", slow=True),
    _configuration("pair: crash", "U U", "cancel crash retry", chain=False, slow=True),
    _configuration("chain: two clears", "U E", "clear=2 cancel", slow=True),
    _configuration("chain: two clears, no probe", "U V", "clear=2 cancel", slow=True),
    _configuration("deadline, retry", "UV", "expire crash cancel=2 retry", slow=True),
    _configuration("chain: deadline, clear", "U U", "expire cancel clear", slow=True),
    _configuration(
        "deadline, undo zombie, two actions", "UU", "expire cancel=2 undo_zombie undo_fails", slow=True
    ),
    _configuration(
        "unbounded: no probe, clear", "V", "exception retry cancel crash clear", bounded=False, slow=True
    ),
    _configuration("chain: undone from a step, clear, cancel", "U V", "place clear cancel", slow=True),
    _configuration("chain: undone from a step, deadline", "U U", "place expire"),
    _configuration("chain: slow listener", "U U", "slow mark clear", slow=True),
    _configuration("chain: mass outage, clear", "U U", "hold crash cancel clear", slow=True),
    _configuration("chain: task marked failed, clear", "U V", "mark_task clear", slow=True),
)
A1_IS_NEEDED = _configuration("A1 dropped, with a probe", "U", "exception retry cancel crash", bounded=False)
"""Expected to break: a probe's no is no proof while the call may still land."""

COVERING: tuple[str, ...] = (
    "unbounded: a probe says no too early",
    "deadline, only reads",
    "keep, then undo",
    "deadline, redo",
    "unavailable",
    "unbounded: idempotent",
    "chain: skipped",
    "compensation is gone",
    "undo zombie",
    "reads, crash",
    "mass outage",
    "chain: keep, marked failed, clear",
    "chain: undone from a step",
    "chain: undone from a step, late",
    "chain: undone from a step, deadline",
)
"""A small choice that together makes every move there is, but for those that need a large configuration."""


def configuration(name: str) -> Configuration:
    return next(found for found in CONFIGURATIONS if found.name == name)
