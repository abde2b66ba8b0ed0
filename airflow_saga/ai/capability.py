"""``SagaCapability``: given to a pydantic-ai agent, it makes what the agent does part of the saga.

Every request to the model and every call of a tool becomes an action of the step that runs. It sees each function tool
of each toolset, however the tool came to the agent, and output functions; it fails closed where it is not told how a
tool is undone. It does not see tools that the provider runs on its side, nor agents that run inside a tool.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic_ai import Agent
from pydantic_ai.capabilities import AbstractCapability, CapabilityOrdering
from pydantic_ai.durable_exec import BaseDurabilityCapability
from pydantic_ai.messages import ModelResponse, ToolCallPart
from pydantic_ai.models import Model, ModelRequestContext
from pydantic_ai.tools import AgentDepsT, RunContext, ToolDefinition
from pydantic_ai.toolsets import AbstractToolset

from airflow_saga.ai.fingerprints import Fingerprints
from airflow_saga.ai.history import Seen, last_rounds, paired
from airflow_saga.ai.masking import masks_results, shown_masked
from airflow_saga.ai.requests import DEFAULT_MODEL_TIMEOUT, RecordedModel, model_request_action
from airflow_saga.ai.threads import ToolThreads
from airflow_saga.ai.tools import (
    TO_THE_MODEL,
    Attempted,
    Declared,
    declare_tools,
    for_the_model,
    names_of,
    shown_again,
    undeclared_tool,
)
from airflow_saga.ai.toolsets import actions_as_toolset, with_true_results
from airflow_saga.core.actions import NOT_RECORDED, Action, recorded_result_of
from airflow_saga.core.errors import (
    ActionDeclarationError,
    InDoubtError,
    NotApplied,
    UndeclaredToolError,
    in_doubt_by,
)
from airflow_saga.core.policies import DEFAULT_TIMEOUT
from airflow_saga.runtime.calls import from_log, in_batch

if TYPE_CHECKING:
    from pydantic_ai.capabilities import (
        WrapOutputProcessHandler,
        WrapRunHandler,
        WrapToolExecuteHandler,
    )
    from pydantic_ai.output import OutputContext
    from pydantic_ai.run import AgentRunResult

log = logging.getLogger(__name__)

DEFAULT_TRIES = 3


class SagaCapability(AbstractCapability[AgentDepsT]):
    """Records an agent's model requests and tool calls as actions of the saga step that runs.

    Made while the DAG file is loaded (in an operator's arguments, or at the top level of the file): the undo of a call
    loads the same file and looks there for what undoes it.

    :param compensations: by the name of a tool (or output function): a function of one ``ActionRecord``, ``READ_ONLY``,
        ``NON_COMPENSABLE``, or a :class:`ToolAction` with more to say.
    :param actions: ``@action`` functions that become tools of the agent, each with the undo it was declared with.
    :param undeclared: what becomes of a tool that neither names. ``"refuse"``: the task fails before the tool runs.
        ``"ask"``: it waits for a person's approval (the provider's tool approval), and runs as NON_COMPENSABLE.
    :param model_timeout: wall-clock limit of one request to the model. Default 30 s.
    :param tool_timeout: wall-clock limit of one call of a tool that declares none. Default 10 s.
    :param tries: how often one request to the model is made at most, over the client's, ours and Airflow's retries
        together; clearing the task grants new ones. Default 3.
    :param keep_rounds: how many rounds of a long conversation the model is sent; None: all.
    :raises ActionDeclarationError: at import, naming the tool.
    """

    id: str | None = "airflow_saga"

    def __init__(
        self,
        compensations: Mapping[str, Declared] | None = None,
        *,
        actions: Sequence[Action[Any, Any]] = (),
        undeclared: Literal["refuse", "ask"] = "refuse",
        model_timeout: timedelta = DEFAULT_MODEL_TIMEOUT,
        tool_timeout: timedelta = DEFAULT_TIMEOUT,
        tries: int = DEFAULT_TRIES,
        keep_rounds: int | None = None,
    ) -> None:
        if undeclared not in ("refuse", "ask"):
            raise ActionDeclarationError(f"undeclared={undeclared!r}: it is 'refuse' or 'ask'")
        if keep_rounds is not None and keep_rounds < 1:
            raise ActionDeclarationError(
                f"keep_rounds={keep_rounds}: a conversation goes on from at least one"
            )
        declared = {**{each.name: each for each in actions}, **(compensations or {})}
        self.undeclared = undeclared
        self.keep_rounds = keep_rounds
        self.tools = declare_tools(declared, timeout=tool_timeout)
        self._own = tuple(actions)
        self._approved = undeclared_tool(tool_timeout) if undeclared == "ask" else None
        self._request = model_request_action(model_timeout, tries)
        self._masked = False
        self._begin_run()

    def __repr__(self) -> str:
        """Names, versions and effects: no address, since Airflow makes a new DAG version where this text changes."""
        tools = names_of(sorted(self.tools.values(), key=lambda each: each.name))
        return f"SagaCapability({tools}; undeclared={self.undeclared})"

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    @classmethod
    def get_serialization_name(cls) -> str | None:
        return None

    def get_ordering(self) -> CapabilityOrdering:
        """Around all others: what they make of a call happens inside the recorded one."""
        return CapabilityOrdering(position="outermost")

    # -- one agent, one run -------------------------------------------------------------------------------------------

    def for_agent(self, agent: Any) -> AbstractCapability[AgentDepsT]:
        """:raises ActionDeclarationError: the agent has a durability capability as well: two logs of one run."""
        found: list[AbstractCapability[Any]] = []
        agent.root_capability.apply(found.append)
        refuse_durability(found)
        bound = copy.copy(self)
        bound._masked = masks_results(found)
        return bound

    async def for_run(self, ctx: RunContext[AgentDepsT]) -> AbstractCapability[AgentDepsT]:
        run = copy.copy(self)
        run._begin_run()
        return run

    def _begin_run(self) -> None:
        self._fingerprints = Fingerprints()
        self._whole = Seen()
        self._from_log: set[str] = set()
        self._replayed: list[ModelResponse] = []
        self._warned = False

    async def wrap_run(self, ctx: RunContext[AgentDepsT], *, handler: WrapRunHandler) -> AgentRunResult[Any]:
        """Sync tools run in threads of this run, whose late answers are not lost."""
        with ToolThreads() as threads, Agent.using_thread_executor(threads):
            return await handler()

    async def before_run(self, ctx: RunContext[AgentDepsT]) -> None:
        """A history that was torn apart is made whole before a new prompt goes on from it. Without one, the calls that
        wait at its end are what the run is about.
        """
        place = len(ctx.messages)
        if ctx.prompt is None:
            places = (i for i, message in enumerate(ctx.messages) if isinstance(message, ModelResponse))
            place = max(places, default=place)
        ctx.messages[:] = [*paired(ctx.messages[:place], self._find_result), *ctx.messages[place:]]

    # -- the model ----------------------------------------------------------------------------------------------------

    def get_wrapper_model(self, model: Model) -> Model | None:
        return RecordedModel(model, self._request, self._fingerprints, self._from_log, self._replayed)

    async def before_model_request(
        self, ctx: RunContext[AgentDepsT], request_context: ModelRequestContext
    ) -> ModelRequestContext:
        """The model gets a conversation that its provider takes, cut to its last rounds if that is wanted."""
        messages = request_context.messages
        whole = self._whole.grown_from(messages)
        messages = [*messages[:whole], *paired(messages[whole:], self._find_result)]
        self._whole.keep(messages)
        if self.keep_rounds is not None:
            messages = last_rounds(messages, self.keep_rounds)
        if messages != request_context.messages:  # what is replaced is looked at anew by everybody after us
            request_context.messages = messages
        return request_context

    async def after_model_request(
        self, ctx: RunContext[AgentDepsT], *, request_context: ModelRequestContext, response: ModelResponse
    ) -> ModelResponse:
        """An answer from the log was paid for by the attempt that asked; it is no request of this one."""
        if any(response is each for each in self._replayed):
            self._replayed.clear()
            ctx.usage.requests -= 1
        return response

    def _find_result(self, call: ToolCallPart) -> object:
        """Of a call whose result a history has lost: what the log of this step holds of it."""
        tool = self.tools.get(call.tool_name)
        return NOT_RECORDED if tool is None else recorded_result_of(tool, call.args_as_dict())

    # -- tools --------------------------------------------------------------------------------------------------------

    def get_toolset(self) -> AbstractToolset[AgentDepsT] | None:
        return actions_as_toolset(self._own) if self._own else None

    def get_wrapper_toolset(self, toolset: AbstractToolset[AgentDepsT]) -> AbstractToolset[AgentDepsT]:
        """What a tool truly returns is seen where it is called, below whatever masks it for the model."""
        return with_true_results(toolset)

    async def prepare_tools(
        self, ctx: RunContext[AgentDepsT], tool_defs: list[ToolDefinition]
    ) -> list[ToolDefinition]:
        unknown = [tool.name for tool in tool_defs if tool.name not in self.tools]
        if not unknown:
            return tool_defs
        if self.undeclared == "ask":
            return [replace(tool, kind="unapproved") if tool.name in unknown else tool for tool in tool_defs]
        if not self._warned:
            self._warned = True
            log.warning(
                "nobody said how to undo the tools %s: a call of one is refused before it runs, and the task fails. "
                "Declare them in SagaCapability({…}), READ_ONLY where they change nothing",
                ", ".join(sorted(unknown)),
            )
        return tool_defs

    async def wrap_tool_execute(
        self,
        ctx: RunContext[AgentDepsT],
        *,
        call: ToolCallPart,
        tool_def: ToolDefinition,
        args: dict[str, Any],
        handler: WrapToolExecuteHandler,
    ) -> Any:
        self._from_log.add(call.tool_call_id)
        tool, kept = self.tools.get(call.tool_name), args
        batch = in_batch.set(_calls_in_last_answer(ctx) > 1)
        try:
            if tool in self._own:
                return await self._as_action(ctx, handler, args)
            if tool is None:
                tool, kept = self._undeclared(call.tool_name, ctx, args)
            return await self._recorded(tool, kept, partial(handler, args))
        finally:
            in_batch.reset(batch)

    async def wrap_output_process(
        self,
        ctx: RunContext[AgentDepsT],
        *,
        output_context: OutputContext,
        output: Any,
        handler: WrapOutputProcessHandler,
    ) -> Any:
        """A function that makes the output runs like a tool, so it is one."""
        if not output_context.has_function or ctx.partial_output:
            return await handler(output)
        name = output_context.function_name or "output"
        arguments = output if isinstance(output, dict) else {"output": output}
        tool = self.tools.get(name)
        if tool is None:
            tool, arguments = self._undeclared(name, ctx, arguments)
        return await self._recorded(tool, arguments, partial(handler, output))

    def _undeclared(
        self, name: str, ctx: RunContext[Any], args: dict[str, Any]
    ) -> tuple[Action[Any, Any], dict[str, Any]]:
        """:raises UndeclaredToolError: before the tool runs."""
        if self._approved is not None and ctx.tool_call_approved:
            return self._approved, {"tool": name, "arguments": args}
        raise UndeclaredToolError(
            f"the agent wants to call {name}, and nobody said how to undo it; nothing was called. Declare it: "
            f"SagaCapability({{{name!r}: …}}) with a compensation, READ_ONLY or NON_COMPENSABLE"
        )

    async def _recorded(
        self, tool: Action[Any, Any], args: Mapping[str, Any], make: Callable[[], Awaitable[Any]]
    ) -> Any:
        attempt = Attempted(make)
        try:
            true = await _to_its_end(tool(arguments=args, attempt=attempt))
        except NotApplied as no:
            raise for_the_model(no) from no
        except TO_THE_MODEL as said:
            raise _stopping(said) from said
        if attempt.made:
            return attempt.shown
        shown = shown_again(true)
        return shown_masked(shown) if self._masked else shown

    async def _as_action(
        self, ctx: RunContext[AgentDepsT], handler: WrapToolExecuteHandler, args: dict[str, Any]
    ) -> Any:
        """A tool that is an action records itself; here only its refusals are told to the model."""
        replayed: list[int] = []
        token = from_log.set(replayed)
        try:
            result = await _to_its_end(handler(args))
        except NotApplied as no:
            raise for_the_model(no) from no
        finally:
            from_log.reset(token)
        ctx.usage.tool_calls -= len(replayed)  # the attempt that made it has counted it
        return result


def _stopping(said: Exception) -> Exception:
    """What a tool says to the model after it may have acted: while nobody knows, the model may not go on."""
    doubt = in_doubt_by(said)
    return said if doubt is None else InDoubtError(doubt)


def _calls_in_last_answer(ctx: RunContext[Any]) -> int:
    last = next((m for m in reversed(ctx.messages) if isinstance(m, ModelResponse)), None)
    return 0 if last is None else sum(isinstance(part, ToolCallPart) for part in last.parts)


async def _to_its_end(call: Awaitable[Any]) -> Any:
    """A call that has begun ends, or is in doubt, by its own limits, not because another of its batch failed."""
    task = asyncio.ensure_future(call)
    cancelled = False
    while True:
        try:
            result = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.done():
                raise
            cancelled = True
            continue
        if cancelled:
            raise asyncio.CancelledError
        return result


def refuse_durability(capabilities: Sequence[object]) -> None:
    """:raises ActionDeclarationError: naming why."""
    for each in capabilities:
        if isinstance(each, BaseDurabilityCapability):
            raise ActionDeclarationError(
                f"{type(each).__name__} and SagaCapability on one agent: both would replay its steps, each from a log "
                f"of its own, and only one of them knows what was undone. Leave out durable=True: a saga resumes an "
                f"agent by itself."
            )
