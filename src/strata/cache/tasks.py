"""Tasks that nobody awaits: kept alive until they end, and a failure of one is logged, not lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger("strata.cache")


def watched(work: Coroutine[Any, Any, None], name: str, among: set[asyncio.Task[None]]) -> asyncio.Task[None]:
    """Run `work` beside everything else; it is in `among` as long as it runs."""
    task = asyncio.create_task(work, name=name)
    among.add(task)
    task.add_done_callback(among.discard)
    task.add_done_callback(_log_failure)
    return task


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s broke; this is a fault in strata", task.get_name(), exc_info=error)
