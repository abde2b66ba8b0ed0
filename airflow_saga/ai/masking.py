"""What the official provider masks for the model, told apart from what a tool truly returned."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

try:
    from airflow.providers.common.ai.utils.masking import mask_secrets
    from airflow.providers.common.ai.utils.toolset_base import AirflowToolset, MaskingCapability
except ImportError:  # an agent outside the provider: nothing masks
    mask_secrets = None  # type: ignore[assignment]
    AirflowToolset = None  # type: ignore[assignment,misc]
    MaskingCapability = None  # type: ignore[assignment,misc]


def masks_results(capabilities: Sequence[object]) -> bool:
    """Whether the provider masks what this agent's tools return."""
    return MaskingCapability is not None and any(isinstance(each, MaskingCapability) for each in capabilities)


def shown_masked(result: Any) -> Any:
    """A recorded result, as the model is given it."""
    return mask_secrets(result)


def before_its_own_mask(toolset: Any, note: Any) -> Any | None:
    """A copy of a toolset that masks its results itself, with ``note`` told what came before; None for any other."""
    if AirflowToolset is None or not isinstance(toolset, AirflowToolset):
        return None
    seen = copy.copy(toolset)
    execute = toolset.execute_tool

    async def execute_tool(name: str, tool_args: dict[str, Any], *, ctx: Any, tool: Any) -> Any:
        result = await execute(name, tool_args, ctx=ctx, tool=tool)
        note(result)
        return result

    seen.execute_tool = execute_tool  # type: ignore[method-assign]
    return seen
