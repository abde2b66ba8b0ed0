"""Answers what a recorded call asks for: by blocking its thread, or by awaiting on its loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg

from airflow_saga.core.actions import Action
from airflow_saga.core.errors import ActionTimedOut, NotApplied
from airflow_saga.core.records import ActionRecord, Applied, Intent, ProbeAnswer, Unknown
from airflow_saga.runtime.calls import RunningCall
from airflow_saga.runtime.ticket import Ticket

if TYPE_CHECKING:
    from airflow_saga.runtime.journal import Journal
    from airflow_saga.runtime.recorder import Recorder


@dataclass(frozen=True)
class Begin:
    """Commit this intent; raises if it may not begin."""

    intent: Intent


@dataclass(frozen=True)
class Retry:
    """Another try of a recorded call; the answer is its number."""

    intent: Intent


@dataclass(frozen=True)
class Perform:
    """Make the call, within its timeout; the answer is what it returned."""

    action: Action[Any, Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    key: str
    seq: int | None
    tries: int


@dataclass(frozen=True)
class Probe:
    """Ask the outside world; never raises: a probe that cannot tell says Unknown."""

    probe: Callable[[ActionRecord], Any]
    record: ActionRecord
    timeout_seconds: float


@dataclass(frozen=True)
class Pause:
    """Wait; a decision to stop ends the wait at once and is raised."""

    seconds: float


@dataclass(frozen=True)
class Ask:
    """Run a verb on the journal's connection."""

    verb: Callable[[psycopg.Connection], Any]


Op = Begin | Retry | Perform | Probe | Pause | Ask
Story = Generator[Op, Any, Any]


def drive(story: Story, recorder: Recorder) -> Any:
    """Run a call on the thread it was made on."""
    answer: Any = None
    problem: BaseException | None = None
    while True:
        try:
            op = story.send(answer) if problem is None else story.throw(problem)
        except StopIteration as end:
            return end.value
        answer, problem = None, None
        try:
            answer = _do(op, recorder)
        except BaseException as raised:
            problem = raised


def _do(op: Op, recorder: Recorder) -> Any:
    journal = recorder.journal
    match op:
        case Begin(intent):
            begun: Ticket[None] = Ticket()
            journal.begin(intent, begun)
            return begun.wait()
        case Perform():
            return _perform(op, journal)
        case Retry(intent):
            tries: Ticket[int] = Ticket()
            journal.retry(intent, tries)
            return tries.wait()
        case Pause(seconds):
            journal.check()
            if journal.stop_event.wait(seconds):
                journal.check()
            return None
        case Probe(probe, record, timeout_seconds):
            return ask_probe(probe, record, timeout_seconds, journal)
        case Ask(verb):
            return journal.ask(verb)


def _perform(op: Perform, journal: Journal) -> Any:
    call = RunningCall(op.action.name, op.action.timeout.total_seconds(), op.seq, op.tries)
    kwargs = {**op.kwargs, "key": op.key} if op.action.wants_key else op.kwargs
    return run_call(call, lambda: op.action.fn(*op.args, **kwargs), journal)


def run_call(call: RunningCall, function: Callable[[], Any], journal: Journal) -> Any:
    """Run a function as a call with a deadline.

    :raises ActionTimedOut: if it was abandoned; carries the result if the call ended after all, too late to count.
    """
    from airflow_saga.runtime.recorder import current_action

    token = current_action.set(call.name)
    journal.calls.enter(call)
    journal.watch(call)
    try:
        result = function()
    except BaseException:
        if not journal.calls.leave(call):
            raise ActionTimedOut(call.why) from None
        raise
    else:
        if not journal.calls.leave(call):
            raise ActionTimedOut(call.why, answered=True, result=result)
        return result
    finally:
        current_action.reset(token)


def ask_probe(
    probe: Callable[[ActionRecord], Any], record: ActionRecord, timeout_seconds: float, journal: Journal
) -> ProbeAnswer:
    """What a verify or confirm probe says; whatever goes wrong in it means Unknown."""
    call = RunningCall(f"the probe of {record.name}", timeout_seconds)
    try:
        answer = run_call(call, lambda: resolve_awaitable(probe(record)), journal)
    except (Exception, ActionTimedOut) as problem:
        journal.warn(f"the probe of {record.name} could not tell: {type(problem).__name__}: {problem}")
        return Unknown()
    if isinstance(answer, Applied | NotApplied | Unknown):
        return answer
    if isinstance(answer, type) and issubclass(answer, NotApplied | Applied | Unknown):
        return answer()
    journal.warn(
        f"the probe of {record.name} returned {type(answer).__name__}, not Applied, NotApplied or Unknown"
    )
    return Unknown()


def resolve_awaitable(value: Any) -> Any:
    """The value, or what a coroutine comes to; for probes and compensations, which run on a thread of their own."""
    if inspect.iscoroutine(value):
        return _run_coroutine(value)
    return value


def _run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:  # this thread's loop is busy: run it on another one
        return pool.submit(asyncio.run, coroutine).result()


# -- on an event loop ---------------------------------------------------------------------------------------------------


async def drive_async(story: Story, recorder: Recorder) -> Any:
    """Run an async action's call on its loop, which never blocks on the store."""
    answer: Any = None
    problem: BaseException | None = None
    while True:
        try:
            op = story.send(answer) if problem is None else story.throw(problem)
        except StopIteration as end:
            return end.value
        answer, problem = None, None
        try:
            answer = await _do_async(op, recorder)
        except BaseException as raised:
            problem = raised


async def _do_async(op: Op, recorder: Recorder) -> Any:
    loop = asyncio.get_running_loop()
    journal = recorder.journal
    match op:
        case Begin(intent):
            begun: Ticket[None] = Ticket(loop)
            journal.begin(intent, begun)
            return await begun.wait_async()
        case Perform():
            return await _perform_async(op, journal)
        case Retry(intent):
            tries: Ticket[int] = Ticket(loop)
            journal.retry(intent, tries)
            return await tries.wait_async()
        case Pause(seconds):
            return await _pause_async(seconds, journal, loop)
        case Probe(probe, record, timeout_seconds):
            return await asyncio.to_thread(ask_probe, probe, record, timeout_seconds, journal)
        case Ask(verb):
            asked: Ticket[Any] = Ticket(loop)
            journal.ask_with(verb, asked)
            return await asked.wait_async()


async def _perform_async(op: Perform, journal: Journal) -> Any:
    from airflow_saga.runtime.recorder import current_action

    kwargs = {**op.kwargs, "key": op.key} if op.action.wants_key else op.kwargs
    call = RunningCall(op.action.name, op.action.timeout.total_seconds(), op.seq, op.tries)

    async def run() -> Any:
        current_action.set(call.name)
        return await op.action.fn(*op.args, **kwargs)

    task = asyncio.ensure_future(run())
    call.task = task
    journal.calls.enter(call)
    journal.watch(call)
    try:
        result = await task
    except BaseException:
        if not task.done():
            task.cancel()
        if not journal.calls.leave(call):
            raise ActionTimedOut(call.why) from None
        raise
    if not journal.calls.leave(call):
        raise ActionTimedOut(call.why, answered=True, result=result)
    return result


async def _pause_async(seconds: float, journal: Journal, loop: asyncio.AbstractEventLoop) -> None:
    journal.check()
    stopped = asyncio.Event()
    journal.on_stop(lambda: loop.call_soon_threadsafe(stopped.set))
    try:
        await asyncio.wait_for(stopped.wait(), seconds)
    except TimeoutError:
        return
    journal.check()
