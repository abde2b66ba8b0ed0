"""What a deferrable operator of a saga leaves to the triggerer, and what comes back from there.

A deferred task has no process of its own. When a person marks it failed or clears it, its saga has its remote work
cancelled, by the undo: once, whatever is killed, and with the answer in the log. So the trigger itself cancels nothing:
it can run twice at once, and its ``on_kill`` gets one second, and no second try.
"""

from __future__ import annotations

import pkgutil
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from airflow.sdk.exceptions import AirflowException, AirflowSkipException, TaskDeferred
from airflow.triggers.base import BaseTaskEndEvent, BaseTrigger, TriggerEvent

_ENDED = "airflow_saga_ended"


class SagaTrigger(BaseTrigger):
    """Another trigger, which runs inside this one as it is, but for two things.

    A user's kill is not handed on: the undo cancels the remote work. And an event that would end the task in the
    triggerer wakes the task instead, so that the log hears of it.

    :param classpath: of the trigger inside.
    :param kwargs: what that one is made with.
    """

    def __init__(self, classpath: str, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.classpath = classpath
        self.kwargs = kwargs
        self._inside: BaseTrigger | None = None

    @classmethod
    def around(cls, trigger: BaseTrigger) -> SagaTrigger:
        """:param trigger: as the operator has made it."""
        classpath, kwargs = trigger.serialize()
        return cls(classpath, kwargs)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.SagaTrigger", {"classpath": self.classpath, "kwargs": self.kwargs}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        inside = self._inside = pkgutil.resolve_name(self.classpath)(**self.kwargs)
        inside.task_instance, inside.trigger_id = self.task_instance, self.trigger_id
        async for event in inside.run():
            yield _waking(event)

    async def cleanup(self) -> None:
        if self._inside is not None:
            await self._inside.cleanup()

    async def on_kill(self) -> None:
        """Nothing: see the module."""


def _waking(event: TriggerEvent) -> TriggerEvent:
    if not isinstance(event, BaseTaskEndEvent):
        return event
    state = getattr(event.task_instance_state, "value", event.task_instance_state)
    return TriggerEvent({_ENDED: str(state), "xcoms": event.xcoms})


@dataclass(frozen=True)
class EndedByTrigger:
    """The trigger has said how the task ends; no method of the operator is to be called."""

    state: str
    xcoms: Mapping[str, Any]

    def carry_out(self, context: Any) -> Any:
        """End the task as the trigger said; its own XCom is what the operator comes to.

        :raises AirflowException: it failed.
        :raises AirflowSkipException: it is skipped.
        """
        if self.state == "failed":
            raise AirflowException("the trigger ended the task as failed")
        if self.state == "skipped":
            raise AirflowSkipException("the trigger ended the task as skipped")
        xcoms = dict(self.xcoms)
        result = xcoms.pop("return_value", None)
        for key, value in xcoms.items():
            context["ti"].xcom_push(key=key, value=value)
        return result


def ended_by_trigger(next_kwargs: Mapping[str, Any] | None) -> EndedByTrigger | None:
    """What the trigger has said about the end of the task, if that is what woke it."""
    event = (next_kwargs or {}).get("event")
    if not isinstance(event, Mapping) or _ENDED not in event:
        return None
    return EndedByTrigger(str(event[_ENDED]), event.get("xcoms") or {})


def told_of(defer: TaskDeferred) -> dict[str, Any]:
    """What the log keeps of a deferral: what the trigger was told, and with what the operator goes on."""
    classpath, kwargs = defer.trigger.serialize()
    return {
        "trigger": classpath,
        "kwargs": dict(kwargs),
        "method": defer.method_name,
        "method_kwargs": dict(defer.kwargs or {}),
    }
