"""After a turn: what its prompt begins with is written for other conversations, once (cache/system_prompts.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from strata.cache.checkpoints import Captured
from strata.cache.prompt_writing import PromptWriting
from strata.cache.system_prompts import SystemPrompts
from strata.cache.tasks import watched
from strata.serve.slots import Slot
from strata.types import Tokens


async def keep_system_prompt(
    prompts: SystemPrompts | None,
    slot: Slot,
    tokens: Tokens,
    captured: Sequence[Captured],
    among: set[asyncio.Task[None]],
) -> None:
    """Start writing it, if it is to be kept and is not yet. The next requests wait for its capture at most.

    `tokens`: of the prompt. `captured`: the checkpoints of the turn; none of them is used up.
    """
    if prompts is None or slot.root is None:
        return
    writing = await prompts.begin(slot.index, slot.root, tokens, held=len(slot.tokens), captured=captured)
    if writing is not None:
        slot.writings.add(writing)
        watched(_finish(prompts, slot, writing), f"keeping a system prompt of slot {slot.index}", among)


async def _finish(prompts: SystemPrompts, slot: Slot, writing: PromptWriting) -> None:
    try:
        await prompts.finish(writing)
    finally:
        slot.writings.discard(writing)
