"""Three sagas on a real Airflow, in one command: one completes, one is cancelled, one is cancelled in part.

    python dags/support/demo.py          start everything, play the three runs, stop everything
    python dags/support/demo.py --up     the same, but leave it running
    python dags/support/demo.py --down   stop what --up left running, and remove it
    python dags/support/demo.py --agent  three runs of an agent instead, with a scripted model

Ends with ``demo: OK`` and exit code 0, or says what differed from what has to come out and exits with 1.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from types import FrameType

import httpx

if not __package__:  # run as a plain script: give the relative imports below their package
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    __package__ = "support"

from . import demo_agent, demo_processes
from .demo_processes import DemoProblem
from .demo_runs import RUNS, Plays, Run, play
from .demo_stack import DAGS, Stack, Stopped, tail

UP = DAGS.parent / ".run" / "demo-up.json"
"""Says where the demo is that `--up` left running."""
WIDTH = 100
BOOKING_SECONDS = 6
"""How long each booking takes in a demo that was left running: four of them are the time to find a button."""
DIFFERING = "This run did not come out as it has to: what differs is said at the end."
ENDING = (signal.SIGTERM, signal.SIGHUP)


class Teller:
    """Prints lines with the seconds since the start; threads may share it."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        with self._lock:
            print(f"[{self.seconds():5.1f} s] {text}", flush=True)


def demo(*, up: bool, agent: bool = False) -> int:
    """Play it; the exit code."""
    teller = Teller()
    stack = Stack(teller.say, agent=agent)
    keep_logs = left = False
    try:
        if up and (there := _claim(stack)):
            print(there)
            return 0
        world = "a travel service, a scripted model" if agent else "a travel service"
        teller.say(f"starting Postgres, {world} and Airflow in {stack.directory}")
        stack.start()
        teller.say(
            f"the UI is at {stack.url}" + ("" if up else " while this runs") + "; three runs are started"
        )
        runs = _play(stack, teller, demo_agent.RUNS if agent else RUNS)
        keep_logs = not _tell(runs)
        left = up and not keep_logs
    except (DemoProblem, httpx.HTTPError) as problem:
        keep_logs = True
        print(f"\n{problem}")
        _tell_logs(getattr(problem, "logs", [stack.airflow_log]))
    except Exception:
        keep_logs = True
        raise
    finally:
        _ignore_signals()
        if left:
            stack.leave()
        elif not _close(stack, up=up, keep_logs=keep_logs):
            keep_logs = True
        if keep_logs:
            print(f"\nall logs are in {stack.logs}\ndemo: FAILED after {teller.seconds():.0f} s")
    if keep_logs:
        return 1
    if left:
        _invite(stack)
    else:
        print("\nTo look around in the UI, `make demo-up` leaves the demo of three trips running.")
    print(f"demo: OK, in {teller.seconds():.0f} s")
    return 0


def _close(stack: Stack, *, up: bool, keep_logs: bool) -> bool:
    if up:
        _disclaim(stack)
    ended = stack.close(keep_logs=keep_logs)
    if not ended:
        print(f"not everything could be stopped or removed, see above; it is in {stack.directory}")
    return ended


def _play(stack: Stack, teller: Teller, plays: Plays) -> list[Run]:
    """The three at once: they do not disturb each other."""
    pool = ThreadPoolExecutor(3, thread_name_prefix="run")
    playing = [pool.submit(play, stack, teller.say, plays, number) for number in (1, 2, 3)]
    try:
        wait(playing, return_when=FIRST_EXCEPTION)
        stack.stopped.set()
        problems = [each.exception() for each in playing]
        for problem in sorted(filter(None, problems), key=lambda each: isinstance(each, Stopped)):
            raise problem
        return [each.result() for each in playing]
    finally:
        stack.stopped.set()
        pool.shutdown(wait=False)


# -- words ------------------------------------------------------------------------------------------------------------


def _tell(runs: list[Run]) -> bool:
    """Print what there is to see; True if all is as it has to be."""
    for run in runs:
        print(f"\n\n{'=' * WIDTH}\nRun {run.number}, {run.dag_id}: {run.title}\n{'=' * WIDTH}")
        print("\n".join(run.seen if not run.differences else [DIFFERING]))
        print(f"\n$ airflow saga show {run.dag_id} {run.run_id}")
        print(textwrap.indent(run.timeline.rstrip(), "  "))
        print(f"\nThe ledger of the travel service for {run.trip}:")
        print(textwrap.indent("\n".join(run.ledger), "  "))
        if run.can_do:
            print("\nWhat a person can do about it:")
            print(textwrap.indent("\n".join(run.can_do), "  "))
    differing = [run for run in runs if run.differences]
    for run in differing:
        _tell_logs(run.logs())
    print(f"\n{'=' * WIDTH}")
    print("\n".join(run.summary for run in runs))
    for run in differing:
        print("\n".join(f"DIFFERS: {each}" for each in run.differences))
    return not differing


def _tell_logs(logs: Iterable[Path]) -> None:
    for log in logs:
        print(f"\n--- the end of {log}")
        print("\n".join(tail(log)))


def _invite(stack: Stack) -> None:
    """Where to click: by names that stand on the pages, so that nobody has to know Airflow or this product."""
    stack.travel.tell("delay", seconds=BOOKING_SECONDS)
    print(
        f"""
Everything is left running.
  UI        {stack.url} (no login: whoever reaches it from this machine is an admin)
  stop one  {stack.url}/dags/book_trip
            click Trigger, Trigger again, and then Saga among the tabs of the run: there is "Stop and undo…".
            Each booking takes {BOOKING_SECONDS} s now, so there is time. It ends with: Cancelled, nothing stands
  undo one  {stack.url}/dags/book_trip/runs/demo-1-completes/plugin/saga-run
            all is booked: "Undo…" shows what it would take back, and does it
  settle    {stack.url}/dags/refund_later/runs/demo-3-refund-later/plugin/saga-run
            a message that cannot be unsent: "Let it stand…", and say why
  all       {stack.url}/plugin/sagas (Browse, Sagas; the home page says how many need a person)
  commands  {stack.airflow_command} saga list
  stop      make demo-down
"""
    )


# -- left running -----------------------------------------------------------------------------------------------------


def _claim(stack: Stack) -> str | None:
    """Write down where the demo is; or say where another one is that was left running."""
    UP.parent.mkdir(exist_ok=True)
    while True:
        with suppress(FileExistsError), UP.open("x") as file:
            json.dump({"directory": str(stack.directory), "url": stack.url}, file)
            return None
        with suppress(FileNotFoundError, ValueError):
            there = json.loads(UP.read_text())
            if Path(there["directory"]).exists():
                return f"the demo is up already: {there['url']} (make demo-down stops it)"
        UP.unlink(missing_ok=True)


def _disclaim(stack: Stack) -> None:
    with suppress(FileNotFoundError, ValueError):
        if json.loads(UP.read_text())["directory"] == str(stack.directory):
            UP.unlink()


def down() -> int:
    """Stop what was left running, and remove it; the exit code."""
    try:
        directory = Path(json.loads(UP.read_text())["directory"])
    except FileNotFoundError:
        print("no demo is up")
        return 0
    demo_processes.end(directory)
    UP.unlink(missing_ok=True)
    print(f"stopped the demo and removed {directory}")
    return 0


# -- signals ----------------------------------------------------------------------------------------------------------


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _ignore_signals() -> None:
    for each in (signal.SIGINT, *ENDING):
        signal.signal(each, signal.SIG_IGN)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--up", action="store_true", help="leave everything running at the end")
    which.add_argument("--down", action="store_true", help="stop and remove what --up has left running")
    which.add_argument("--agent", action="store_true", help="three runs of an agent, with a scripted model")
    options = parser.parse_args()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace", line_buffering=True)
    # Also where a shell that put this into the background had it ignored.
    for each in (signal.SIGINT, *ENDING):
        signal.signal(each, _interrupt)
    try:
        return down() if options.down else demo(up=options.up, agent=options.agent)
    except KeyboardInterrupt:
        print("demo: interrupted; everything is stopped and removed")
        return 130
    except DemoProblem as problem:
        print(f"demo: {problem}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
