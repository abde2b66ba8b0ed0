"""What a person decides about a saga, the same from a command, from the API and from the tab.

Each verb writes its decision into the store first and then starts the undo run, where there is one to start. What
Airflow hinders is said, and left to the reconciler: the decision stands.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg

from airflow_saga import metadata
from airflow_saga.core.errors import UnknownSagaError, VerbRefusedError
from airflow_saga.core.identity import compensation_dag_id, forward_dag_id, undo_run_id
from airflow_saga.core.records import StepRow
from airflow_saga.core.states import ActionState, Mode, RequestState
from airflow_saga.metadata import MetadataUnreadableError
from airflow_saga.operators.review import option_of
from airflow_saga.questions import Given, answer_questions
from airflow_saga.runtime.codec import encode_masked
from airflow_saga.settings import Settings, secrets_of_this_process
from airflow_saga.store.decision import Decision, Verdict
from airflow_saga.store.reader import Reader
from airflow_saga.store.requests import RequestVerbs
from airflow_saga.store.resolve import ResolveVerbs
from airflow_saga.store.rewind import RewindVerbs
from airflow_saga.store.runs import RunVerbs
from airflow_saga.store.settle import SettleVerbs
from airflow_saga.telling.display import Display, plural
from airflow_saga.telling.told import request_data, saga_data
from airflow_saga.trigger import clear_from, start_probe_run, trigger_undo

PLAN_PREFIX = 8


@dataclass(frozen=True)
class Answer:
    """What came of a verb.

    :ivar is_done: the saga is, or will be, as was asked; False: it is refused, and why is in the decision's message.
    :ivar started: the undo run that carries it out, with a ``message``; None where there is none.
    """

    decision: Decision
    is_done: bool
    started: dict[str, Any] | None = None

    def as_data(self, display: Display) -> dict[str, Any]:
        """For programs: the names stay."""
        decision = self.decision
        return {
            "verdict": decision.verdict.name.lower(),
            "message": display.text(decision.message) or "",
            "saga": saga_data(decision.saga, display) if decision.saga else None,
            "request": request_data(decision.request, display) if decision.request else None,
            "undo_run": self.started,
        }


class Verbs:
    """The decisions of one person about one saga.

    :param connection: to the store, open and checked.
    :param actor: who decides, as the history shows it: ``cli:NAME`` or ``user:NAME``.
    :param triggered_by: as Airflow shows it at the undo run: ``cli``, ``rest_api`` or ``ui``.
    :param warn: told what was hindered and went on all the same.
    """

    def __init__(
        self,
        connection: psycopg.Connection,
        dag_id: str,
        run_id: str,
        *,
        actor: str,
        triggered_by: str,
        warn: Callable[[str], None],
    ) -> None:
        self.connection = connection
        self.dag_id = dag_id
        self.run_id = run_id
        self._actor = actor
        self._triggered_by = triggered_by
        self._warn = warn

    # -- the verbs ----------------------------------------------------------------------------------------------------

    def cancel(self, *, reason: str | None = None, keep: bool = False, now: bool = False) -> Answer:
        """Stop the running saga, then undo it, or keep its effects."""
        run = self.known_run()
        decision = RequestVerbs(self.connection).cancel(
            self.dag_id,
            self.run_id,
            actor=self._actor,
            reason=scrubbed(reason),
            clear_number=run.clear_number,
            keep=keep,
            stop_now=now,
            run_is_success=run.state == "success",
        )
        return self._answer(decision, is_done=_is_cancelled(decision, keep))

    def undo(
        self,
        *,
        reason: str | None = None,
        now: bool = False,
        plan_hash: str | None = None,
        from_action: int | None = None,
    ) -> Answer:
        """Undo the saga in whatever state it is, or, when it is at rest, only what came from an action on.

        :param plan_hash: at least eight characters of the hash of a plan: do exactly that, or refuse.
        """
        run = self.known_run()
        asked: dict[str, Any] = {
            "actor": self._actor,
            "reason": scrubbed(reason),
            "clear_number": run.clear_number,
            "plan_hash": self._whole_hash(plan_hash, from_action) if plan_hash else None,
        }
        if from_action is None:
            verbs = RequestVerbs(self.connection)
            decision = verbs.undo(self.dag_id, self.run_id, stop_now=now, **asked)
        else:
            if run.state == "success":  # the reconciler may not have told the saga yet
                RunVerbs(self.connection).complete_if_over(self.dag_id, self.run_id)
            decision = RewindVerbs(self.connection).undo_from(self.dag_id, self.run_id, from_action, **asked)
        return self._answer(decision, is_done=decision.verdict is not Verdict.IGNORED)

    def retry(self, action_id: int, *, reason: str | None = None) -> Answer:
        """Try the undo of one action again that has failed, or that could not be settled."""
        decision = SettleVerbs(self.connection).retry(
            self.dag_id, self.run_id, action_id, actor=self._actor, reason=scrubbed(reason)
        )
        return self._answer(decision, is_done=True)

    def rewind(self, to: str, *, reason: str | None = None) -> Answer:
        """Go back to a save-point; the tasks concerned are cleared, and the run goes on from there."""
        run = self.known_run()
        asked = RewindVerbs(self.connection).rewind(
            self.dag_id,
            self.run_id,
            to,
            actor=self._actor,
            reason=scrubbed(reason),
            clear_number=run.clear_number,
        )
        # Cleared tasks wait for the undo; were it to run first, the run could end in between.
        message = f"{self.dag_id} / {self.run_id} goes back to {to}; undone: {', '.join(asked.undone)}"
        message += f"; {self._clear_from(asked.step)}"
        return self._answer(Decision(Verdict.REWINDING, message, asked.saga, asked.request), is_done=True)

    def resolve(
        self, action_id: int, *, to: str, note: str, result: Any = None, has_result: bool = False
    ) -> Answer:
        """Say what became of an action, where the product cannot know.

        :param result: what the call gave, as plain data, where ``has_result``.
        """
        decision = ResolveVerbs(self.connection).resolve(
            self.dag_id,
            self.run_id,
            action_id,
            to=to,
            actor=self._actor,
            note_text=scrubbed(note) or "",
            result=self._encoded(result) if has_result else None,
        )
        answer = self._answer(decision, is_done=True)
        self._answer_questions(action_id, Given(option_of(to), scrubbed(note) or "", self._actor))
        return answer

    def probe(self) -> Answer:
        """Have the verify probes asked about what is in doubt, so that a person knows more before deciding.

        :raises VerbRefusedError: nothing is in doubt, or Airflow cannot ask now.
        """
        view = Reader(self.connection).view(self.dag_id, self.run_id)
        doubtful = [row for row in view.residual if row.state == ActionState.IN_DOUBT]
        if not doubtful:
            raise VerbRefusedError(f"{self.dag_id} / {self.run_id}: nothing is in doubt, so nobody is asked")
        user, by = self._actor.partition(":")[2] or self._actor, self._triggered_by
        probe_id = start_probe_run(self.dag_id, self.run_id, user=user, triggered_by=by)
        undo_dag_id = compensation_dag_id(self.dag_id)
        if probe_id is None:
            raise VerbRefusedError(
                f"{undo_dag_id} could not be started, so no probe is asked; look: airflow saga doctor"
            )
        names = ", ".join(row.name for row in doubtful[:5]) + (" …" if len(doubtful) > 5 else "")
        told = {
            "dag_id": undo_dag_id,
            "run_id": probe_id,
            "triggered": True,
            "message": f"{undo_dag_id} / {probe_id} asks{_if_paused(undo_dag_id)}; the plan shows what they say",
        }
        message = f"asking the verify probes about {names}; nothing else is called"
        return Answer(Decision(Verdict.ASKING, message, view.saga), is_done=True, started=told)

    def release(self) -> Answer:
        """Let an undo go on that is held since many sagas failed at once."""
        decision = RequestVerbs(self.connection).release(self.dag_id, self.run_id, actor=self._actor)
        return self._answer(decision, is_done=True)

    # -- parts --------------------------------------------------------------------------------------------------------

    def known_run(self) -> metadata.Run:
        """The run as Airflow sees it; where Airflow has forgotten it, as the store does.

        :raises UnknownSagaError: it is no run of a saga DAG; no row is made for it.
        """
        forward = forward_dag_id(self.dag_id)
        if forward is not None:
            raise UnknownSagaError(
                f"{self.dag_id} undoes runs of {forward}; name {forward} and the run that is undone: airflow saga list"
            )
        saga = Reader(self.connection).find(self.dag_id, self.run_id)
        try:
            run = metadata.run_of(self.dag_id, self.run_id)
            undo_dag = metadata.dags_of([compensation_dag_id(self.dag_id)])
        except MetadataUnreadableError as problem:
            if saga is None:
                raise
            self._warn(
                f"Airflow's own database cannot be read ({problem}); going by what the saga store knows"
            )
            run, undo_dag = None, {}
        if saga is not None:
            return run or metadata.Run("unknown", max(saga.clear_number, saga.stop_clear_number))
        if run is None:
            raise UnknownSagaError(
                f"neither Airflow nor the saga store knows a run {self.run_id!r} of {self.dag_id!r}; nothing was done. "
                f"See: airflow saga list"
            )
        if not undo_dag:
            raise UnknownSagaError(
                f"{self.dag_id} / {self.run_id} is no saga: none of its steps is in the store, and Airflow knows no "
                f"DAG {compensation_dag_id(self.dag_id)}. Nothing was done."
            )
        return run

    def _whole_hash(self, begun: str, from_action: int | None) -> str:
        """The hash that a person began to type, if it is the one of now; the store checks it again when it decides."""
        digest = Reader(self.connection).plan(self.dag_id, self.run_id, from_action).digest
        is_begun = len(begun) >= PLAN_PREFIX and digest.startswith(begun)
        return digest if is_begun else begun

    def _clear_from(self, step: StepRow) -> str:
        try:
            cleared = clear_from(self.dag_id, self.run_id, step.task_id, step.map_index)
        except Exception as problem:  # noqa: BLE001 - the undo is asked for, whatever hinders Airflow: say what is left to do
            why = (str(problem).splitlines() or [type(problem).__name__])[0]
            return f"Airflow could not clear {step.label} ({why}): clear it and what is downstream by hand"
        return f"{plural(cleared, 'task')} cleared, from {step.label} on"

    def _answer_questions(self, action_id: int, given: Given) -> None:
        """The store has decided; what Airflow still asks about it is answered alike."""
        saga = Reader(self.connection).saga(self.dag_id, self.run_id)
        requests = Reader(self.connection).requests(saga.saga_id)
        for said in answer_questions(self.dag_id, requests, action_id, given):
            self._warn(said)

    def _encoded(self, value: Any) -> str:
        pattern = secrets_of_this_process().pattern()
        encoded, masked = encode_masked(value, pattern, max_bytes=Settings.load().max_value_bytes)
        for path in masked:
            self._warn(f"{path} holds a known secret and is kept as ***")
        return encoded

    def _answer(self, decision: Decision, *, is_done: bool) -> Answer:
        started = self._start_undo(decision) if is_done else None
        saga = Reader(self.connection).find(self.dag_id, self.run_id)
        told = Decision(decision.verdict, decision.message, saga, decision.request)
        return Answer(told, is_done, started)

    def _start_undo(self, decision: Decision) -> dict[str, Any] | None:
        """Start the undo run at once, where there is one to start; what fails here the reconciler does."""
        request = decision.request
        if request is None or not decision.undoes:
            return None
        dag_id, run_id = compensation_dag_id(self.dag_id), undo_run_id(request.request_uuid)
        told: dict[str, Any] = {
            "dag_id": dag_id,
            "run_id": request.owner_run_id or run_id,
            "triggered": False,
        }
        if request.state == RequestState.QUEUED:
            return told | {"message": "it begins when the undo under way has ended"}
        if request.state != RequestState.REQUESTED:
            return told | {"message": f"{dag_id} / {told['run_id']} carries it out", "triggered": True}
        if not trigger_undo(request, self.dag_id, self.run_id, triggered_by=self._triggered_by):
            return told | {
                "message": f"{dag_id} could not be started now; the reconciler starts it within its minute"
            }
        RequestVerbs(self.connection).note_triggered(request.request_uuid)
        return told | {
            "message": f"{dag_id} / {run_id} carries it out{_if_paused(dag_id)}",
            "triggered": True,
        }


def _is_cancelled(decision: Decision, keep: bool) -> bool:
    if keep and decision.verdict is Verdict.ALREADY:
        return decision.saga is not None and decision.saga.mode == Mode.KEEP
    return decision.verdict not in (Verdict.FINISHED, Verdict.IGNORED)


def _if_paused(dag_id: str) -> str:
    try:
        if metadata.dags_of([dag_id])[dag_id].is_paused:
            return f", but that DAG is paused; run: airflow dags unpause {shlex.quote(dag_id)}"
    except (MetadataUnreadableError, KeyError):
        return ", if that DAG is not paused"
    return ""


def scrubbed(text: str | None) -> str | None:
    """What a person types is kept for long: without the secrets that Airflow knows."""
    return None if text is None else secrets_of_this_process().scrub(text)
