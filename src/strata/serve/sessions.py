"""The slots API behind HTTP: save what a slot holds as a session, restore one into a slot, erase a slot.

A slot is taken like a request takes one: while it is busy, the action waits for it (as llama-server's does), and the
slot is busy meanwhile. What a restore or an erase would lose is parked first, as when a request takes the slot. Whose
a slot or a session is follows from its root key: of another API key's slot nothing is saved or erased (403), another
key's session does not exist (404). How the bytes move is in cache/sessions.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from strata.cache.sessions import SessionMover, SessionState
from strata.errors import BadRequest, Busy, Forbidden, NotFound, NotSupported, StrataError
from strata.rules import prefix
from strata.serve.making_room import empty, empty_idle
from strata.serve.parks import Workshop
from strata.serve.slots import Slot, Slots
from strata.store.session import SessionFile
from strata.store.session_names import session_name_problem
from strata.types import Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """`n_tokens` went to or came from a file of `n_bytes`. `seconds` count from when the slot was ours."""

    n_tokens: int
    n_bytes: int
    seconds: float


class Sessions:
    """Every method raises StrataError, with the HTTP status it has; a slot that was not to be changed is as it was."""

    def __init__(self, shop: Workshop, mover: SessionMover) -> None:
        self._shop = shop
        self._mover = mover

    def __repr__(self) -> str:
        return f"Sessions({self._mover!r})"

    def status(self) -> dict[str, object]:
        return self._mover.status()

    async def save(self, index: int, name: str, namespace: str) -> Moved:
        """What slot `index` holds as the session `name`; one that has this name already is replaced."""
        self._check(name)
        root = self._root(namespace)
        async with self._taken(index, "saving", owner=root) as slot:
            began = time.perf_counter()
            if not len(slot.tokens) or slot.root is None:
                raise BadRequest(f"slot {index} is empty: there is nothing to save", field="id_slot")
            tokens = slot.tokens
            state = SessionState(
                slot=index,
                root=slot.root,
                tokens=tokens,
                frontier=slot.frontier if 0 < slot.frontier <= len(tokens) else None,
                conversation=prefix.conversation_key(slot.root, tokens, self._shop.engine.info.openers),
            )
            n_bytes = await self._mover.save(state, owner=namespace, name=name)
            self._tell(state.conversation, "save", f"{len(tokens)} tokens, slot {index} -> session")
            return Moved(n_tokens=len(tokens), n_bytes=n_bytes, seconds=time.perf_counter() - began)

    async def restore(self, index: int, name: str, namespace: str) -> Moved:
        """The session `name` into slot `index`, whatever that holds.

        A refusal before the file was validated leaves the slot as it was; one after it leaves the slot empty.
        """
        self._check(name)
        self._slot(index)
        began = time.perf_counter()
        file = await self._mover.check(owner=namespace, name=name, namespace=namespace)
        checked_s = time.perf_counter() - began
        n_tokens = file.plan.manifest.n_tokens
        async with self._taken(index, "restoring", owner=None, brings=n_tokens) as slot:
            began = time.perf_counter()
            await empty(self._shop, slot)
            await empty_idle(self._shop)
            try:
                await self._mover.apply(file, index)
            except BaseException:
                await asyncio.shield(self._clear_after_failure(slot))
                raise
            self._fill(slot, file)
        seconds = checked_s + time.perf_counter() - began
        manifest = file.plan.manifest
        self._tell(manifest.conversation, "restore", f"{manifest.n_tokens} tokens, session -> slot {index}")
        return Moved(n_tokens=manifest.n_tokens, n_bytes=file.plan.file_bytes, seconds=seconds)

    async def erase(self, index: int, namespace: str) -> int:
        """Empty slot `index`; how many tokens it held. What is owed to its conversation is parked first."""
        async with self._taken(index, "erasing", owner=self._root(namespace)) as slot:
            n_tokens = len(slot.tokens)
            await empty(self._shop, slot)
        return n_tokens

    # ------------------------------------------------------------------------------------------------------- the parts

    def _root(self, namespace: str) -> Key:
        return prefix.root_key(self._shop.engine.info.fingerprint, namespace)

    def _check(self, name: str) -> None:
        if problem := session_name_problem(name):
            raise BadRequest(f"filename: {problem}", field="filename")
        info = self._shop.engine.info
        if not info.cuttable and not info.checkpoint_bytes:
            raise NotSupported(f"slots of this model cannot be saved or restored: {info.mode_reason}")

    def _slot(self, index: int) -> Slot:
        slots = self._shop.slots.all
        if not 0 <= index < len(slots):
            raise NotFound(f"there is no slot {index}; there are {len(slots)}, from 0", field="id_slot")
        return slots[index]

    @asynccontextmanager
    async def _taken(
        self, index: int, doing: str, *, owner: Key | None, brings: int | None = None
    ) -> AsyncIterator[Slot]:
        """Slot `index` for ourselves. `owner`: whose it must be, if it holds anything. `brings`: tokens it will hold.

        Raises Busy when the K/V pool has no room for them.
        """
        slot = self._slot(index)
        _check_owner(slot, owner)
        await self._shop.slots.take_one(slot, doing)
        pool = self._shop.pool
        claim = pool.claim(index, len(slot.tokens) if brings is None else brings)
        try:
            _check_owner(slot, owner)
            if brings is None:
                pool.enter_anyway(claim)
            elif not pool.enters(claim):
                raise Busy(f"the K/V pool has no room for {brings} tokens beside what runs; try later", retry_after_s=5)
            yield slot
        finally:
            pool.leave(claim)
            self._shop.slots.give_back(slot)

    async def _clear_after_failure(self, slot: Slot) -> None:
        slot.forget()
        with contextlib.suppress(StrataError):  # an engine that is gone holds nothing
            await self._shop.engine.trim(slot.index, 0)

    def _fill(self, slot: Slot, file: SessionFile) -> None:
        """The next request can go on from it, and it is parked when it leaves."""
        manifest = file.plan.manifest
        slot.root, slot.tokens = manifest.root, manifest.token_ids
        slot.frontier, slot.owed, slot.came_from = manifest.frontier or 0, True, "session"

    def _tell(self, conversation: bytes, verb: str, detail: str) -> None:
        if self._shop.cache is not None:
            self._shop.cache.story.tell(time.time(), conversation, verb, detail)


def _check_owner(slot: Slot, owner: Key | None) -> None:
    if owner is not None and slot.root is not None and slot.root != owner:
        raise Forbidden(f"slot {slot.index} holds a conversation of another API key", field="id_slot")


def slot_list(slots: Slots, *, context: int, root: Key) -> list[dict[str, Any]]:
    """GET /slots in llama-server's shape. Never text or tokens; of another key's slots only whether they are busy."""
    answer = []
    for slot in slots.all:
        shown: dict[str, Any] = {
            "id": slot.index,
            "n_ctx": context,
            "speculative": False,
            "is_processing": slot.busy,
            "state": slot.doing,
            "n_waiting": slots.waiting,
        }
        if slot.root in (None, root):
            shown |= {"n_past": len(slot.tokens), "n_prompt_tokens": slot.total if slot.busy else len(slot.tokens)}
        answer.append(shown)
    return answer
