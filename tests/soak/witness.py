"""`strata`, which also says in /v1/status what only its insides know: what is leased, promised, passing, begun.

Run as `python -m tests.soak.witness serve ...`. It changes nothing: it counts the parks that begin, and adds an entry
"inside" to the status.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from strata.cache.cache import ConversationCache
from strata.cli.main import main
from strata.serve.wiring import Server

_begun = 0


def counted(original: Callable[..., Any]) -> Callable[..., Any]:
    def begin_park(self: ConversationCache, *args: Any) -> Any:
        global _begun
        _begun += 1
        return original(self, *args)

    return begin_park


def with_inside(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def status(self: Server) -> dict[str, Any]:
        found = original(self)
        if self._shop is not None and self._shop.cache is not None:
            found["inside"] = inside(self._shop.cache)
        return found

    return status


def inside(cache: ConversationCache) -> dict[str, Any]:
    """`busy`: whatever is in use or promised, which must be nothing at rest."""
    indexes = {disk.name: disk.index for disk in cache._all_disks()}
    busy: dict[str, int] = {"passing_bytes": cache._pool._passing_bytes, "waiters": len(cache._pool._waiters)}
    if cache.ram is not None:
        indexes["ram"] = cache.ram.index
        busy["promised_bytes"] = cache.ram.promised_bytes
        busy["promised_conversations"] = cache.ram._promised
        busy["retired_bytes"] = cache.ram._retired_bytes
    for name, index in indexes.items():
        busy[f"{name}_leases"] = sum(index._leases.values())
    return {"check": cache.check(), "busy": {name: n for name, n in busy.items() if n}, "parks_begun": _begun}


if __name__ == "__main__":
    ConversationCache.begin_park = counted(ConversationCache.begin_park)  # type: ignore[method-assign]
    Server.status = with_inside(Server.status)  # type: ignore[method-assign]
    sys.exit(main())
