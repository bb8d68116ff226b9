"""The RAM level: what conversations are made of, in the arena, shared between them; a budget and a most number of them.

Segments, and checkpoints of memory that cannot be cut, whose blocks lie there like those of a segment of one stage.

Belongs to the event loop. The blocks lie in shared memory of the front process, so they outlive the engine process.
Each block gets a digest when it arrives, on threads of its own, and is checked against it before it is used again: the
engine process can write to the arena, and may have died doing so. Whether memory can be had, and where else a state
could go, is decided elsewhere (rules/placement.py); this module only says what it would have to give up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from strata.cache.blocks import BlockPool
from strata.cache.entries import Conversation
from strata.cache.state import LevelIndex
from strata.rules.eviction import Eviction
from strata.store.hashing import Hasher
from strata.types import BLOCK_BYTES, Key, Segment, Span, StageShape, Tokens

Blocks = tuple[tuple[Span, ...], ...]
"""The blocks of a segment or checkpoint in the arena: [block][stage]."""
Payloads = tuple[tuple[memoryview, ...], ...]
"""The payloads of the blocks, in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RamLimits:
    """`most`: conversations kept at once."""

    budget_bytes: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    blocks: Blocks
    payloads: Payloads
    digests: Future[tuple[bytes, ...]]  # in the order of the blocks, stage by stage within each


class RamLevel:
    """What is kept in RAM."""

    name = "ram"

    def __init__(self, pool: BlockPool, limits: RamLimits, *, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.index = LevelIndex()
        self._pool = pool
        self._clock = clock
        self._hasher = Hasher("ram")
        self._held: dict[Key, _Held] = {}
        self._serials = 0
        self._retired: dict[Key, list[_Held]] = {}  # damaged ones that were replaced while they were in use
        self._retired_bytes = 0
        self._used_bytes = 0
        self._promised_bytes = 0
        self._promised = 0  # conversations
        self.is_durable: Callable[[Conversation], bool] = lambda _: False
        """Whether a disk level has the state too."""
        self.is_live: Callable[[Conversation], bool] = lambda _: False
        """Whether the state still lies in a slot."""
        self.provisional: set[int] = set()
        """Conversations of cancelled requests: nothing is owed to them."""
        self.is_last = True
        """No disk level is below: what does not fit is deleted here."""

    def __repr__(self) -> str:
        return f"RamLevel({self.index!r}, {self._used_bytes} of {self.limits.budget_bytes} bytes)"

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def promised_bytes(self) -> int:
        """What parks that are under way will still bring."""
        return self._promised_bytes

    # ---------------------------------------------------------------------------------------------------------- asking

    def blocks(self, key: Key) -> Blocks:
        return self._held[key].blocks

    def payloads(self, key: Key) -> Payloads:
        """Payloads and padding of a segment's blocks, [block][stage]. Lease the segment as long as they are used."""
        return self._held[key].payloads

    async def digests(self, key: Key) -> tuple[tuple[bytes, ...], ...]:
        """What the blocks had when they arrived, [block][stage]."""
        held = self._held[key]
        flat = await asyncio.wrap_future(held.digests)
        n_stages = len(held.blocks[0])
        return tuple(flat[i : i + n_stages] for i in range(0, len(flat), n_stages))

    async def is_intact(self, key: Key, block: int, n_bytes: Sequence[int]) -> bool:
        """Whether a block still has the digests it arrived with. `n_bytes`: of its payload, by stage."""
        expected = (await self.digests(key))[block]
        payloads = self._held[key].payloads[block]
        views = [payload[:n] for payload, n in zip(payloads, n_bytes, strict=True)]
        return await asyncio.wrap_future(self._hasher.digests(views)) == expected

    def evictable_bytes(self, keys: Sequence[Key] = ()) -> int:
        """What could be given back at once without `keys`: what is safe elsewhere; all when this is the last level."""
        return self.plan_to_free(1 << 62, keys).freed_bytes

    def room_for_bytes(self, need_bytes: int, keys: Collection[Key]) -> Eviction:
        """What must go so that so many bytes fit the budget, of whichever conversation; not what `keys` name."""
        return self.index.plan_eviction(
            used_bytes=self._used_bytes + self._promised_bytes,
            need_bytes=need_bytes,
            budget_bytes=self.limits.budget_bytes,
            coming=keys,
            rank=self._rank,
        )

    def room_for(
        self, need_bytes: int, keys: Sequence[Key], *, supersedes: Collection[int], provisional: bool
    ) -> Eviction:
        """What must go so that a conversation of these segments fits budget and number; see `fits`.

        `need_bytes`: of those that are missing. `supersedes`: what leaves when it has come. For a cancelled request
        only others of its kind go.
        """
        return self.index.plan_eviction(
            used_bytes=self._used_bytes + self._promised_bytes,
            need_bytes=need_bytes,
            budget_bytes=self.limits.budget_bytes,
            too_many=self._others(supersedes) + 1 - self.limits.most,
            coming=frozenset(keys),
            rank=self._rank_for_provisional if provisional else self._rank,
        )

    def fits(self, plan: Eviction, *, supersedes: Collection[int]) -> bool:
        """Whether a plan of `room_for` is enough."""
        stay = self._others(supersedes) - len(set(plan.serials) - set(supersedes))
        return not plan.short_bytes and stay < self.limits.most

    def _others(self, supersedes: Collection[int]) -> int:
        return len(self.index.conversations()) + self._promised - len(supersedes)

    def plan_to_free(self, n_bytes: int, keys: Sequence[Key] = ()) -> Eviction:
        """What must go to free `n_bytes` of memory, without the segments `keys`."""
        return self.index.plan_eviction(
            used_bytes=n_bytes, need_bytes=0, budget_bytes=0, coming=frozenset(keys), rank=self._rank
        )

    def _rank(self, conversation: Conversation) -> int | None:
        """What is durable goes before what lies in a slot as well, which is lost with the engine process."""
        if conversation.serial in self.provisional or self.is_durable(conversation):
            return 0
        if self.is_live(conversation):
            return 1
        return 2 if self.is_last else None

    def _rank_for_provisional(self, conversation: Conversation) -> int | None:
        return 0 if conversation.serial in self.provisional else None

    def superseded_by(
        self, conversation: bytes, root: Key, tokens: Tokens, *, born: int, provisional: bool = False
    ) -> tuple[int, ...]:
        """What a state that was parked `born` makes superfluous; a provisional one only provisional ones."""
        old = self.index.superseded_by(conversation, root, tokens, born=born)
        return tuple(serial for serial in old if serial in self.provisional) if provisional else old

    # -------------------------------------------------------------------------------------------------------- changing

    def promise(self, n_bytes: int, conversations: int = 0) -> None:
        """Count what a park will bring; give it back with negative numbers."""
        self._promised_bytes += n_bytes
        self._promised += conversations

    def add_segment(
        self,
        segment: Segment,
        tokens: Tokens,
        blocks: Blocks,
        payload_bytes: Sequence[Sequence[int]],
        stages: tuple[StageShape, ...],
    ) -> None:
        """Keep a captured segment, which the caller leases after this. `payload_bytes`: by [block][stage]."""
        if self.index.holds(segment.key):
            for spans in blocks:
                self._pool.give_back(spans)
            return
        self.index.add_segment(segment, tokens, self._hold(segment.key, blocks, payload_bytes), stages)

    def add_checkpoint(self, key: Key, place: tuple[Key, int], n_bytes: int, spans: Sequence[Span]) -> None:
        """Keep a captured checkpoint of `n_bytes`, a span per block, which the caller leases after this.

        `place`: see rules.prefix.checkpoint_place.
        """
        if self.index.holds(key):
            self._pool.give_back(spans)
            return
        sizes = [[min(BLOCK_BYTES, n_bytes - at)] for at in range(0, n_bytes, BLOCK_BYTES)]
        arena_bytes = self._hold(key, tuple((span,) for span in spans), sizes)
        self.index.add_checkpoint(key, arena_bytes, n_bytes=n_bytes, place=place)

    def _hold(self, key: Key, blocks: Blocks, payload_bytes: Sequence[Sequence[int]]) -> int:
        """Have the blocks hashed, and own them; what they take in the arena."""
        self._retire(key)
        payloads = tuple(
            tuple(self._pool.payload(span, n) for span, n in zip(spans, sizes, strict=True))
            for spans, sizes in zip(blocks, payload_bytes, strict=True)
        )
        views = [
            payload[:n]
            for row, sizes in zip(payloads, payload_bytes, strict=True)
            for payload, n in zip(row, sizes, strict=True)
        ]
        n_bytes = sum(span.length for spans in blocks for span in spans)
        digests = self._hasher.digests(views)
        self._held[key] = _Held(blocks=blocks, payloads=payloads, digests=digests)
        self._used_bytes += n_bytes
        return n_bytes

    def add_conversation(
        self,
        root: Key,
        tokens: Tokens,
        frontier: int | None,
        conversation: bytes,
        keys: tuple[Key, ...],
        *,
        born: int,
        checkpoints: tuple[tuple[int, Key], ...] = (),
        provisional: bool = False,
    ) -> tuple[Conversation, tuple[int, ...]]:
        """Keep a conversation that is all here; also the serials of those it superseded, which are gone.

        `checkpoints`: position and key, ascending.

        It is among them when a later state of it came first.
        """
        self._serials += 1
        entry = Conversation(
            serial=self._serials,
            root=root,
            conversation=conversation,
            tokens=tokens,
            frontier=frontier or 0,
            keys=keys,
            manifest_bytes=0,
            stamp_s=self._clock(),
            born=born,
            checkpoints=checkpoints,
        )
        old = self.superseded_by(conversation, root, tokens, born=born, provisional=provisional)
        if provisional:
            self.provisional.add(entry.serial)
        if self.index.is_outdated(entry):
            old = (*old, entry.serial)
        self.index.add_conversation(entry)
        self.drop(old)
        return entry, old

    def promote(self, keys: Sequence[Key]) -> int | None:
        """A provisional conversation of just these segments is owed from now on; its serial, if there is one."""
        same = (s for s in self.provisional if self.index.conversation(s).keys == tuple(keys))
        serial = next(same, None)
        self.provisional.discard(serial or 0)
        return serial

    def drop(self, serials: Iterable[int]) -> None:
        """Let conversations go, and the segments that only they need and nobody uses."""
        gone = [serial for serial in serials if self.index.has_conversation(serial)]
        self.provisional.difference_update(gone)
        self._free(self.index.remove_conversations(gone))

    def check(self) -> list[str]:
        """Every inconsistency found, in words."""
        wrong = self.index.check()
        if sum(map(_bytes_of, self._held.values())) + self._retired_bytes != self._used_bytes:
            wrong.append("the used bytes differ from the segments that are held")
        if any(self.index.bytes_of(key) != _bytes_of(held) for key, held in self._held.items()):
            wrong.append("the segments that are held differ from the index")
        if not self.provisional <= {c.serial for c in self.index.conversations()}:
            wrong.append("a provisional conversation is not in the index")
        if any(key not in self._held for c in self.index.conversations() for key in c.objects):
            wrong.append("a conversation names a segment that is not held")
        if self._used_bytes > self.limits.budget_bytes or len(self.index.conversations()) > self.limits.most:
            wrong.append(f"{self._used_bytes} bytes used and {len(self.index.conversations())} kept, over the limits")
        if self._promised_bytes < 0 or self._promised < 0:
            wrong.append(f"{self._promised_bytes} bytes and {self._promised} conversations are promised")
        return wrong

    def quarantine(self, key: Key) -> None:
        """Never use a segment again whose bytes changed. It is freed once nobody reads it."""
        if key not in self._held:
            return
        n_bytes = self.index.bytes_of(key)
        self.index.remove_segments([key])
        self.index.note_bytes(key, n_bytes)

    def lease(self, keys: Iterable[Key]) -> None:
        """Keep these segments in place until `release`."""
        self.index.lease(keys)

    def release(self, keys: Sequence[Key]) -> None:
        self.index.release(keys)
        unused = [key for key in keys if not self.index.is_leased([key])]
        for key in unused:
            for held in self._retired.pop(key, ()):
                self._retired_bytes -= _bytes_of(held)
                self._let_go(held)
        self._free(key for key in unused if not self.index.is_named(key))

    def _retire(self, key: Key) -> None:
        """Make place for a new copy of a damaged segment; who still reads the old one may go on."""
        if key in self._held:
            self._retired.setdefault(key, []).append(self._held.pop(key))
            self._retired_bytes += _bytes_of(self._retired[key][-1])

    def _free(self, keys: Iterable[Key]) -> None:
        for key in dict.fromkeys(keys):
            held = self._held.pop(key, None)
            if held is not None:
                self.index.remove_segments([key])
                self._let_go(held)

    def _let_go(self, held: _Held) -> None:
        self._used_bytes -= _bytes_of(held)
        if held.digests.done():
            self._give_back(held)
        else:  # its bytes are still being read
            asyncio.wrap_future(held.digests).add_done_callback(partial(self._give_back_later, held))

    def _give_back(self, held: _Held) -> None:
        for spans in held.blocks:
            self._pool.give_back(spans)

    def _give_back_later(self, held: _Held, _: object) -> None:
        self._give_back(held)

    def close(self) -> None:
        """End the threads. The arena takes the memory back."""
        self._hasher.shutdown()


def _bytes_of(held: _Held) -> int:
    return sum(span.length for spans in held.blocks for span in spans)
