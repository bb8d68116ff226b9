"""Routes about the server itself: /health (open to everybody) and /v1/status."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from strata.errors import Unavailable
from strata.web.errors import json_response
from strata.web.exchange import ServerSeam


def admin_routes(server: ServerSeam) -> APIRouter:
    router = APIRouter(tags=["Server"])

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> Response:
        ready, reason = server.health()
        if not ready:
            raise Unavailable(reason)
        return json_response({"status": "ok"})

    @router.get("/v1/status")
    async def status() -> Response:
        return json_response(server.status())

    return router
