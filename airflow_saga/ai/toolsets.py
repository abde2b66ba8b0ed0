"""Toolsets as the saga needs them: one that shows what a tool truly returned, and one made of actions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from pydantic_ai.tools import AgentDepsT, RunContext
from pydantic_ai.toolsets import AbstractToolset, FunctionToolset
from pydantic_ai.toolsets.abstract import ToolsetTool
from pydantic_ai.toolsets.wrapper import WrapperToolset

from airflow_saga.ai.masking import before_its_own_mask
from airflow_saga.ai.tools import current_attempt
from airflow_saga.core.actions import Action


def with_true_results(toolset: AbstractToolset[AgentDepsT]) -> AbstractToolset[AgentDepsT]:
    """The same toolset; what each of its tools returns is noted before anything changes it."""
    return toolset.visit_and_replace(_noting)


def _noting(leaf: AbstractToolset[Any]) -> AbstractToolset[Any]:
    return before_its_own_mask(leaf, _note) or _Noting(leaf)


def _note(result: Any) -> None:
    attempt = current_attempt.get()
    if attempt is not None:
        attempt.true.append(result)


class _Noting(WrapperToolset[Any]):
    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[Any], tool: ToolsetTool[Any]
    ) -> Any:
        result = await self.wrapped.call_tool(name, tool_args, ctx, tool)
        _note(result)
        return result


def actions_as_toolset(actions: Sequence[Action[Any, Any]]) -> FunctionToolset[Any]:
    """Tools of an agent that are actions: each call records itself under the undo it was declared with."""
    toolset: FunctionToolset[Any] = FunctionToolset(id="airflow_saga_actions")
    for each in actions:
        toolset.add_function(_as_function(each), name=each.name, takes_ctx=False)
    return toolset


def _as_function(action: Action[Any, Any]) -> Callable[..., Any]:
    """A plain function with the action's signature, without ``key``: what a tool's schema is made from."""

    async def call_async(*args: Any, **kwargs: Any) -> Any:
        return await action(*args, **kwargs)

    def call_sync(*args: Any, **kwargs: Any) -> Any:
        return action(*args, **kwargs)

    call: Callable[..., Any] = call_async if action.is_async else call_sync
    functools.update_wrapper(call, action.fn)
    call.__annotations__ = {k: v for k, v in inspect.get_annotations(action.fn).items() if k != "key"}
    call.__signature__ = action.signature  # type: ignore[attr-defined]
    del call.__wrapped__  # type: ignore[attr-defined]
    return call
