"""Answers what a recorded call asks for: by blocking its thread, or by awaiting on its loop."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg

from airflow_saga.core.actions import Action
from airflow_saga.core.errors import (
    ActionRefusedError,
    ActionTimedOut,
    NotApplied,
    NotInSagaError,
    StoreUnavailableError,
)
from airflow_saga.core.records import ActionRecord, Applied, Intent, ProbeAnswer, Unknown
from airflow_saga.core.states import ActionState
from airflow_saga.runtime.calls import RunningCall, current_action
from airflow_saga.runtime.ticket import Ticket

if TYPE_CHECKING:
    from airflow_saga.runtime.journal import Journal
    from airflow_saga.runtime.recorder import Recorder


BEGIN_WITHIN_SECONDS = 1.0
"""A1: a call starts within this of sending its intent, else the intent is asserted again."""
ASSERTIONS = 3


class CallNotBegun(BaseException):
    """The intent stands, and the call was not made, so it has no effect. ``why``: what the body gets to hear."""

    def __init__(self, why: BaseException) -> None:
        super().__init__(str(why))
        self.why = why


class Begin(NamedTuple):
    """Commit this intent; raises if it may not begin. The answer is when it was sent, in monotonic seconds."""

    intent: Intent


class Retry(NamedTuple):
    """Another try of a recorded call; the answer is its number, and when it was sent.

    ``was``: the state of the row before, which is true again if the call is not made after all.
    """

    intent: Intent
    was: ActionState


class Perform(NamedTuple):
    """Make the call, within its timeout; the answer is what it returned. ``sent`` None: READ_ONLY, it has no intent."""

    action: Action[Any, Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    intent: Intent
    sent: float | None
    tries: int

    def running(self) -> RunningCall:
        seq = None if self.sent is None else self.intent.seq
        return RunningCall(self.action.name, self.action.timeout.total_seconds(), seq, self.tries)

    def keywords(self) -> Mapping[str, Any]:
        return {**self.kwargs, "key": self.intent.key} if self.action.wants_key else self.kwargs


class Probe(NamedTuple):
    """Ask the outside world; never raises: a probe that cannot tell says Unknown."""

    probe: Callable[[ActionRecord], Any]
    record: ActionRecord
    timeout_seconds: float


class Pause(NamedTuple):
    """Wait; a decision to stop ends the wait at once and is raised."""

    seconds: float


class Ask(NamedTuple):
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
        except BaseException as raised:  # noqa: BLE001 - the story decides
            problem = raised


def _do(op: Op, recorder: Recorder) -> Any:
    journal = recorder.journal
    match op:
        case Begin(intent):
            begun: Ticket[float] = Ticket()
            try:
                journal.begin(intent, begun)
                return begun.wait()
            except BaseException:
                _withdraw(journal, intent, ActionState.FAILED, begun)
                raise
        case Perform():
            return _perform(op, journal)
        case Retry(intent, was):
            tries: Ticket[tuple[int, float]] = Ticket()
            try:
                journal.retry(intent, tries)
                return tries.wait()
            except BaseException:
                _withdraw(journal, intent, was, tries)
                raise
        case Pause(seconds):
            journal.check()
            if journal.stop_event.wait(seconds):
                journal.check()
            return None
        case Probe(probe, record, timeout_seconds):
            return ask_probe(probe, record, timeout_seconds, journal)
        case Ask(verb):
            return journal.ask(verb)


def _withdraw(journal: Journal, intent: Intent, was: ActionState, ticket: Ticket[Any]) -> None:
    """Whoever waits for an intent may be cancelled or interrupted: then it may be committed, and is not followed."""
    if not ticket.refused:
        with suppress(StoreUnavailableError, NotInSagaError):
            journal.withdraw(intent, was, ticket)


def _perform(op: Perform, journal: Journal) -> Any:
    for _ in range(ASSERTIONS):
        if _in_time(op.sent):
            return run_call(op.running(), partial(op.action.fn, *op.args, **op.keywords()), journal)
        ticket: Ticket[float] = Ticket()
        try:
            journal.assert_again(op.intent, ticket)
            op = op._replace(sent=ticket.wait())
        except BaseException as refused:  # noqa: BLE001 - the story hands it on
            raise CallNotBegun(refused) from None
    raise CallNotBegun(_too_slow(op))


def _in_time(sent: float | None) -> bool:
    return sent is None or time.monotonic() - sent <= BEGIN_WITHIN_SECONDS


def _too_slow(op: Perform) -> ActionRefusedError:
    return ActionRefusedError(
        f"{op.action.name}: this process or the saga store is too slow to begin a call safely: more than "
        f"{BEGIN_WITHIN_SECONDS:g} s went by between its intent and the call, {ASSERTIONS} times; nothing was called"
    )


def run_call(call: RunningCall, function: Callable[[], Any], journal: Journal) -> Any:
    """Run a function as a call with a deadline.

    :raises ActionTimedOut: if it was abandoned; carries the result if the call ended after all, too late to count.
    """
    token = current_action.set(call.name)
    try:
        journal.calls.enter(call)
        journal.watch(call)
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
    except (Exception, ActionTimedOut) as problem:  # noqa: BLE001 - whatever it is, it cannot tell
        journal.warn(f"the probe of {record.name} could not tell: {type(problem).__name__}: {problem}")
        return Unknown()
    told = probe_answer(answer)
    if told is None:
        journal.warn(
            f"the probe of {record.name} returned {type(answer).__name__}, not Applied, NotApplied or Unknown"
        )
    return told or Unknown()


def probe_answer(answer: object) -> ProbeAnswer | None:
    """What a probe returned, an answer or its class; None: neither."""
    if isinstance(answer, type) and issubclass(answer, NotApplied | Applied | Unknown):
        return answer()
    return answer if isinstance(answer, Applied | NotApplied | Unknown) else None


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


# -- on an event loop -----------------------------------------------------------------------------------------------


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
        except BaseException as raised:  # noqa: BLE001 - the story decides
            problem = raised


async def _do_async(op: Op, recorder: Recorder) -> Any:
    loop = asyncio.get_running_loop()
    journal = recorder.journal
    match op:
        case Begin(intent):
            begun: Ticket[float] = Ticket(loop)
            try:
                journal.begin(intent, begun)
                return await begun.wait_async()
            except BaseException:
                _withdraw(journal, intent, ActionState.FAILED, begun)
                raise
        case Perform():
            return await _perform_async(op, journal, loop)
        case Retry(intent, was):
            tries: Ticket[tuple[int, float]] = Ticket(loop)
            try:
                journal.retry(intent, tries)
                return await tries.wait_async()
            except BaseException:
                _withdraw(journal, intent, was, tries)
                raise
        case Pause(seconds):
            return await _pause_async(seconds, journal, loop)
        case Probe(probe, record, timeout_seconds):
            return await asyncio.to_thread(ask_probe, probe, record, timeout_seconds, journal)
        case Ask(verb):
            asked: Ticket[Any] = Ticket(loop)
            journal.ask_with(verb, asked)
            return await asked.wait_async()


async def _perform_async(op: Perform, journal: Journal, loop: asyncio.AbstractEventLoop) -> Any:
    for _ in range(ASSERTIONS):
        if _in_time(op.sent):
            return await _run_call_async(op, journal)
        ticket: Ticket[float] = Ticket(loop)
        try:
            journal.assert_again(op.intent, ticket)
            op = op._replace(sent=await ticket.wait_async())
        except BaseException as refused:  # noqa: BLE001 - the story hands it on
            raise CallNotBegun(refused) from None
    raise CallNotBegun(_too_slow(op))


async def _run_call_async(op: Perform, journal: Journal) -> Any:
    call = op.running()

    async def run() -> Any:
        current_action.set(call.name)
        return await op.action.fn(*op.args, **op.keywords())

    task = asyncio.ensure_future(run())
    call.task = task
    loop = asyncio.get_running_loop()

    def cut_short() -> None:
        with suppress(RuntimeError):  # that loop is closed by now
            loop.call_soon_threadsafe(task.cancel)

    if op.action.closes_on_stop:
        journal.on_stop(cut_short)
    try:
        journal.calls.enter(call)
        journal.watch(call)
        result = await task
    except BaseException:
        if not task.done():
            task.cancel()
        if not journal.calls.leave(call):
            raise ActionTimedOut(call.why) from None
        raise
    finally:
        if op.action.closes_on_stop:
            journal.off_stop(cut_short)
    if not journal.calls.leave(call):
        raise ActionTimedOut(call.why, answered=True, result=result)
    return result


async def _pause_async(seconds: float, journal: Journal, loop: asyncio.AbstractEventLoop) -> None:
    journal.check()
    stopped = asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # that loop is closed by now
            loop.call_soon_threadsafe(stopped.set)

    journal.on_stop(wake)
    try:
        await asyncio.wait_for(stopped.wait(), seconds)
    except TimeoutError:
        return
    finally:
        journal.off_stop(wake)
    journal.check()
