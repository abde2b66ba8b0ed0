"""`python -m tests.bench [NAME …]`: run all benchmarks, or those whose names begin with one of these."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from airflow_saga.store import migrate
from airflow_saga.store.connect import Address
from tests.bench import agents, cancels, crowd, single
from tests.bench.ground import Floor
from tests.bench.report import Report
from tests.support.postgres import PostgresServer, available_servers

BENCHES: dict[str, Callable[[Address, Report], None]] = {
    "action_overhead": single.action_overhead,
    "action_overhead_10000": single.action_overhead_10000,
    "undo_overhead": single.undo_overhead,
    "resume_1000": single.resume_1000,
    "resume_10000": single.resume_10000,
    "checkpoint_10000": single.checkpoint_10000,
    "cancel_seen": cancels.cancel_seen,
    "cancel_seen_polling": cancels.cancel_seen_polling,
    "cancel_linear": cancels.cancel_linear,
    "agent_tool_call": agents.agent_tool_call,
    "agent_turn": agents.agent_turn,
    "agent_1000": agents.agent_1000,
    "agent_cancel": agents.agent_cancel,
    "concurrent_8": lambda address, report: crowd.concurrent(address, report, 8),
    "concurrent_32": lambda address, report: crowd.concurrent(address, report, 32),
    "concurrent_128": lambda address, report: crowd.concurrent(address, report, 128),
}


def main(names: list[str]) -> int:
    logging.disable(logging.WARNING)  # the lines are for machines, and a log line costs as much as an action
    _, bin_dir = next(iter(available_servers()))
    report = Report()
    with PostgresServer(bin_dir, durable=True) as server:
        address = Address(server.url)
        migrate.upgrade(server.url)
        Floor(address).close()
        for name, bench in BENCHES.items():
            if not names or any(name.startswith(wanted) for wanted in names):
                bench(address, report)
    for exceeded in report.exceeded:
        print(f"limit exceeded: {exceeded}", file=sys.stderr)
    return 1 if report.exceeded else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
