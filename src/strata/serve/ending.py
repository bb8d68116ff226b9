"""The end of a server, within limits: turns put their slots in order, slots are parked, writers flushed.

An engine that hangs holds nothing up for longer than that: it is killed. The order of it all is in wiring.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from typing import Any

from strata.engine.client import EngineClient
from strata.serve.parks import Workshop, leave

SETTLE_LIMIT_S = 10.0
"""How long turns that were cut off may take to put their slots in order."""
FLUSH_LIMIT_S = 60.0
"""How long a stopping server writes what is still in memory."""
SILENT_S = 30.0
"""After how long without an answer the engine counts as not healthy; a stopping server waits for it no longer then."""

log = logging.getLogger("strata")


async def settled(turns: Collection[asyncio.Task[Any]]) -> None:
    """Wait until they have ended, or SETTLE_LIMIT_S."""
    if turns:
        await asyncio.wait(turns, timeout=SETTLE_LIMIT_S)


async def put_away(shop: Workshop, engine: EngineClient) -> None:
    """Park what is live and flush the writers within FLUSH_LIMIT_S; say how far it is and what was not written."""
    cache = shop.cache
    if cache is None:
        return
    for slot in shop.slots.all:
        if not slot.busy and not slot.provisional:
            leave(shop, slot, stays=0)
    deadline = time.monotonic() + FLUSH_LIMIT_S
    while shop.parks and (left := deadline - time.monotonic()) > 0:
        if engine.silent_s > SILENT_S:
            log.warning("the engine does not answer: what only its slots hold is lost")
            await engine.close(0)
        log.info("parking %d conversations (at most %.0f s more)", len(shop.parks), left)
        await asyncio.wait(shop.parks, timeout=min(1.0, left))
    flushing = asyncio.ensure_future(cache.flush(max(0.1, deadline - time.monotonic())))
    while not (await asyncio.wait([flushing], timeout=1.0))[0]:
        left = deadline - time.monotonic()
        log.info("writing %d conversations (at most %.0f s more)", 1 + cache.unwritten, left)
    lost = len(shop.parks) + cache.unwritten
    if lost or not flushing.result():
        log.warning("%d conversations were not written, or not in time; what was acknowledged before is safe", lost)
    counts = cache.counters
    kept = sum(len(disk.index.conversations()) for disk in cache.disks)
    parked = counts.parked_ram + counts.parked_disk + counts.parked_disk_transient
    log.info("kept %d conversations; parked %d, restored %d", kept, parked, counts.restores)
