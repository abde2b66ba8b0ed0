"""``python -m tests.model [NAME …]``: explore by hand, and print the shortest way to each violation.

NAME is a configuration or a guard (a mutant without it, in every everyday configuration); none: all configurations.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from tests.model.configurations import CONFIGURATIONS, Configuration
from tests.model.explore import explore
from tests.model.guards import GUARDS, Guards
from tests.model.protocol import Protocol


def wanted(names: list[str]) -> Iterator[tuple[Configuration, Guards]]:
    for configuration in CONFIGURATIONS:
        if not names or configuration.name in names:
            yield configuration, Guards()
    for guard in GUARDS:
        if guard in names:
            yield from ((found, Guards().without(guard)) for found in CONFIGURATIONS if not found.slow)


def main(names: list[str]) -> None:
    for configuration, guards in wanted(names):
        began = time.monotonic()
        found = explore(Protocol(configuration, guards))
        what = found.story if found.violation else "every promise holds, every world reaches an end"
        took = f"{time.monotonic() - began:.1f} s"
        print(f"{configuration.name}: {found.worlds} worlds, {found.edges} edges, {took}: {what}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
