"""llama-server's slots API: GET /props, GET /slots, and POST /slots/{id}?action=save|restore|erase.

Covers the spelling of requests and answers, field names as in llama-server. What is done, and every refusal with its
status, is in serve/sessions.py. An action on a busy slot waits until its request has ended, as llama-server defers it.
"""

from __future__ import annotations

import re
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

import strata
from strata.errors import BadRequest, NotFound, Unavailable
from strata.serve.sessions import Moved, Sessions
from strata.web.auth import namespace_of
from strata.web.bodies import body_schema, read_body
from strata.web.errors import json_response
from strata.web.exchange import ServerSeam

BODY_BYTES = 64 << 10
ACTIONS = ("save", "restore", "erase")


class SlotBody(BaseModel):
    """The body of POST /slots/{id}?action=save and restore."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    filename: str


def slot_routes(server: ServerSeam) -> APIRouter:
    router = APIRouter(tags=["llama-server"])

    @router.get("/props")
    async def props() -> Response:
        facts = server.facts()
        return json_response(
            {
                "default_generation_settings": {"n_ctx": facts["context_tokens"]},
                "total_slots": facts["slots"],
                "model_alias": server.model_name,
                "build_info": f"strata {strata.__version__}",
            }
        )

    @router.get("/slots")
    async def slots(request: Request) -> Response:
        found = server.slots(namespace_of(request.scope))
        wants_a_free_one = request.query_params.get("fail_on_no_slot", "0") not in ("", "0", "false")
        if wants_a_free_one and all(slot["is_processing"] for slot in found):
            raise Unavailable("no slot available")
        return json_response(found)

    @router.post("/slots/{id_slot}", openapi_extra=dict(body_schema(SlotBody)))
    async def act(request: Request, id_slot: str, action: str = "") -> Response:
        sessions, namespace = server.sessions(), namespace_of(request.scope)
        index = slot_number(id_slot)
        if action not in ACTIONS:
            raise BadRequest(f"action: it must be one of {', '.join(ACTIONS)}, not {action!r}", field="action")
        if action == "erase":
            return json_response({"id_slot": index, "n_erased": await sessions.erase(index, namespace)})
        body = await read_body(request, SlotBody, BODY_BYTES)
        return json_response(await _move(sessions, action, index, body.filename, namespace))

    return router


async def _move(sessions: Sessions, action: str, index: int, name: str, namespace: str) -> dict[str, Any]:
    if action == "save":
        moved = await sessions.save(index, name, namespace)
        return _answer(index, name, moved, tokens="n_saved", n_bytes="n_written", ms="save_ms")
    moved = await sessions.restore(index, name, namespace)
    return _answer(index, name, moved, tokens="n_restored", n_bytes="n_read", ms="restore_ms")


def _answer(index: int, name: str, moved: Moved, *, tokens: str, n_bytes: str, ms: str) -> dict[str, Any]:
    return {
        "id_slot": index,
        "filename": name,
        tokens: moved.n_tokens,
        n_bytes: moved.n_bytes,
        "timings": {ms: round(moved.seconds * 1000, 3)},
    }


def slot_number(text: str) -> int:
    """Raises BadRequest for what is no number, NotFound for one that no slot can have."""
    if not re.fullmatch(r"-?[0-9]+", text):
        raise BadRequest(f"id_slot: {text!r} is not a whole number", field="id_slot")
    if text.startswith("-") or len(text) > 9:
        raise NotFound(f"there is no slot {text[:20]}; they are counted from 0", field="id_slot")
    return int(text)
