"""The system-prompt cache: what many conversations begin with, on a disk level of its own (SPEC §8).

Covers what a request's system prompt is found by, what is counted, which variants go, and when one is written
(prompt_writing.py does it). It is read like any other stored prefix (ladder.py). Its level takes no part in the
cascade: nothing is handed down to it or from it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import msgspec

from strata.cache.admission import Admission
from strata.cache.blocks import BlockPool
from strata.cache.checkpoints import Captured, CheckpointTaker
from strata.cache.counters import CacheCounters
from strata.cache.disk import DiskLevel
from strata.cache.entries import NO_MATCH, Conversation, Match
from strata.cache.prompt_writing import PromptWriting
from strata.cache.put import DiskLimits, Leaving
from strata.cache.story import Story
from strata.cache.tasks import watched
from strata.cache.writing import manifest_of, transient_need_bytes
from strata.engine.interface import Engine
from strata.rules.placement import Floor
from strata.rules.system_prompts import Variant, beyond_count, variant_of
from strata.store.format import CheckpointEntry, Manifest
from strata.store.level import Level
from strata.types import Key, Tokens

log = logging.getLogger("strata.cache")

LEVEL_NAME = "system-prompt"
RESTAMP_S = 3600.0
"""The time of the last use is written again when the one on disk is older than this."""
_NO_ROOM = "the one unused longest, beyond --system-prompt-cache-slots or --system-prompt-cache-mib"
_RESTAMP_TICKET = -1  # no write of the level has it


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemPromptLimits:
    """`most` variants, 0 = no limit; `max_age_s` since the last use, 0 = never by time.

    `least`: a system prompt has at least so many tokens. `declared`: variants of another declared key are not used.
    """

    budget_bytes: int
    most: int = 2
    max_age_s: float = 0.0
    declared: str = ""
    least: int = 2048


@dataclass(slots=True, kw_only=True)
class SystemPromptCounters:
    """Counts since the start. A request asks when its system prompt reaches beyond what slots and levels offer: it ends
    as a hit, or as a miss. A hit is also what gets tokens from here when another restore failed (rung 4).

    `hash_changes`: requests whose system prompt is another one than the request's before, or, for the first, than the
    newest that was kept, of the same API key. `tokens_saved`: loaded from here, and used. `admitted`,
    `admitted_transient`, `admission_refused`: reads, by the floor. `given_up`: writes that were not finished.
    """

    hits: int = 0
    misses: int = 0
    hash_changes: int = 0
    tokens_saved: int = 0
    written: int = 0
    given_up: int = 0
    oversized: int = 0
    admitted: int = 0
    admitted_transient: int = 0
    admission_refused: int = 0


class SystemPrompts:
    """The variants of one directory, for one engine."""

    def __init__(
        self,
        *,
        level: Level,
        limits: SystemPromptLimits,
        engine: Engine,
        pool: BlockPool,
        admission: Admission,
        counters: CacheCounters,
        story: Story,
        clock: Callable[[], float],
    ) -> None:
        """Scans the directory. Raises OSError when it cannot be listed."""
        self.limits = limits
        self.counters = SystemPromptCounters()
        kept = DiskLimits(budget_bytes=limits.budget_bytes, max_age_s=limits.max_age_s)
        self.disk = DiskLevel(level, kept, engine.info.fingerprint, clock)
        self.disk.on_leaving = self._leave
        self.taker: CheckpointTaker | None = None
        """Of memory that cannot be cut."""
        self._engine = engine
        self._pool = pool
        self._admission = admission
        self._cache_counters = counters
        self._story = story
        self._clock = clock
        self._seen: dict[Key, Key] = {}  # by conversation root, of which there is one per API key
        self._stamped_s = {c.serial: c.stamp_s for c in self.disk.index.conversations()}  # as on disk
        self._too_large: Key | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"SystemPrompts({self.disk!r}, {self.counters})"

    # ---------------------------------------------------------------------------------------------------------- asking

    def _variant(self, root: Key, tokens: Tokens) -> Variant | None:
        return variant_of(root, self.limits.declared, tokens, self._engine.info.openers, self.limits.least)

    def find(self, root: Key, tokens: Tokens) -> Match:
        """The system prompt of `tokens`, if exactly that is kept; counts nothing."""
        variant = self._variant(root, tokens)
        return NO_MATCH if variant is None else self._match(variant)

    def ask(self, root: Key, tokens: Tokens, *, beyond: int) -> Match:
        """The same for a request to which slots and levels offer less than `beyond` tokens. What is found must end in
        `note_restore` or `miss`."""
        variant = self._variant(root, tokens)
        if variant is None:
            return NO_MATCH
        self._note_change(root, variant)
        if variant.n_tokens < beyond:
            return NO_MATCH
        match = self._match(variant)
        if not match.upto:
            self.miss()
        return match

    def _match(self, variant: Variant) -> Match:
        index = self.disk.index
        if not index.stores(variant.keys):
            return NO_MATCH
        path = tuple(held for key in variant.keys if (held := index.held(key)) is not None)
        if self._engine.info.cuttable:
            return Match(path=path, upto=variant.n_tokens)
        found = index.checkpoints_along(variant.root, variant.tokens)
        if not found or found[-1].position != variant.n_tokens:
            return NO_MATCH
        return Match(path=path, upto=variant.n_tokens, checkpoint=found[-1])

    def _note_change(self, root: Key, variant: Variant) -> None:
        last = self._seen.get(root)
        if last is None:
            kept = [c for c in self.disk.index.conversations() if c.root == variant.root]
            last = Key(max(kept, key=lambda c: (c.stamp_s, c.serial)).conversation) if kept else variant.name
        self.counters.hash_changes += last != variant.name
        self._seen[root] = variant.name

    def admits(self, need_bytes: int) -> bool:
        """Whether memory admits reading what was found."""
        admission = self._admission.read(LEVEL_NAME, need_bytes, counted=False)
        self.counters.admitted += admission.floor is Floor.PARKING
        self.counters.admitted_transient += admission.floor is Floor.TRANSIENT
        self.counters.admission_refused += admission.floor is None
        return admission.admitted

    def miss(self) -> None:
        """A request asked, and reads its system prompt."""
        self.counters.misses += 1

    def note_restore(self, root: Key, tokens: Tokens, n_loaded: int, *, asked: bool) -> None:
        """A restore for `tokens` has ended, `n_loaded` of them are from here. `asked`: for what `ask` found."""
        self.counters.tokens_saved += n_loaded
        if not n_loaded:
            self.counters.misses += asked
            return
        self.counters.hits += 1
        variant = self._variant(root, tokens)
        entry = None if variant is None else self._entry(variant)
        if entry is not None:
            self._use(entry)

    def _entry(self, variant: Variant) -> Conversation | None:
        return next((c for c in self.disk.index.conversations() if c.conversation == variant.name), None)

    # ---------------------------------------------------------------------------------------------------------- writing

    def wants_checkpoint(self, root: Key, tokens: Tokens) -> int | None:
        """Where memory that cannot be cut needs a checkpoint, so that the system prompt of `tokens` can be written."""
        variant = self._variant(root, tokens)
        return variant.n_tokens if variant is not None and self._is_missing(variant) else None

    def _is_missing(self, variant: Variant) -> bool:
        coming = (manifest.conversation for manifest in self.disk.manifests_under_way)
        return not self._match(variant).upto and variant.name not in coming

    async def begin(
        self, slot: int, root: Key, tokens: Tokens, *, held: int, captured: Sequence[Captured]
    ) -> PromptWriting | None:
        """Write the system prompt of a prompt `tokens`, of which `slot` holds the first `held`; `run` must follow.

        None: there is none, it is kept already, or it cannot be now. `captured`: the checkpoints of the turn; what is
        needed of them is copied.
        """
        variant = self._variant(root, tokens)
        if variant is None or held < variant.n_tokens or not self._is_missing(variant) or not self.disk.health.usable:
            return None
        at_end = next((taken for taken in captured if taken.position == variant.n_tokens), None)
        if at_end is None and not self._engine.info.cuttable:
            return None
        manifest = self._manifest(variant, at_end)
        if not self._fits(variant, manifest):
            return None
        checkpoint: Captured | None = None
        if at_end is not None and self.taker is not None:
            checkpoint = await self.taker.copy(at_end)
            if checkpoint is None or not self._is_missing(variant):
                self._pool.give_back(() if checkpoint is None or checkpoint.room is None else checkpoint.room.spans)
                return None
        return PromptWriting(
            slot,
            variant,
            self.disk.begin_put(manifest, whole=True),
            checkpoint=checkpoint,
            disk=self.disk,
            engine=self._engine,
            pool=self._pool,
            counters=self._cache_counters,
        )

    def _manifest(self, variant: Variant, at_end: Captured | None) -> Manifest:
        return manifest_of(
            self._engine,
            tokens=variant.tokens,
            frontier=None,
            conversation=variant.name,
            segments=variant.segments,
            checkpoints=() if at_end is None else (CheckpointEntry(position=at_end.position, n_bytes=at_end.n_bytes),),
        )

    def _fits(self, variant: Variant, manifest: Manifest) -> bool:
        """Whether the level's budget and physical memory admit the write."""
        n_bytes = sum(manifest.objects.values())
        if n_bytes > self.limits.budget_bytes:
            if self._too_large != variant.name:  # once, not with every request
                self.counters.oversized += 1
                message = "a system prompt of %d tokens is not kept: its %d bytes are more than the budget of %d"
                log.warning(message, variant.n_tokens, n_bytes, self.limits.budget_bytes)
            self._too_large = variant.name
            return False
        missing = frozenset(key for key in variant.keys if not self.disk.index.holds(key))
        need_bytes = transient_need_bytes(self._engine, self._pool, variant.segments, missing)
        return self._admission.read(f"{LEVEL_NAME} save", need_bytes, counted=False).admitted

    async def finish(self, writing: PromptWriting) -> None:
        """Carry out a write that was begun."""
        outcome = await writing.run()
        variant = writing.variant
        if not outcome.durable:
            self.counters.given_up += 1
            log.info("a system prompt of %d tokens is not kept now: %s", variant.n_tokens, outcome.reason)
            return
        self.counters.written += 1
        self._stamped_s[outcome.serial] = self._clock()
        self._story.tell(self._clock(), variant.name, "park", f"{variant.n_tokens} tokens -> {LEVEL_NAME}")
        self._keep_count()

    # ----------------------------------------------------------------------------------------------------------- upkeep

    def tick(self) -> None:
        """What is too old, too much or too many goes. Called every few seconds."""
        self.disk.retry_stuck()
        self.disk.age_out()
        self._keep_count()

    def _keep_count(self) -> None:
        index = self.disk.index
        stamps_s = ((c.stamp_s, c.serial) for c in index.conversations())
        for serial in beyond_count(stamps_s, self.limits.most):
            if not index.is_leased(index.conversation(serial).objects):
                self.disk.let_go([serial], "budget")

    def _leave(self, disk: DiskLevel, serials: Sequence[int], why: Leaving) -> None:
        for serial in serials:
            gone = disk.index.conversation(serial)
            self._stamped_s.pop(serial, None)
            if why in ("budget", "age"):
                reason = _NO_ROOM if why == "budget" else "not used for longer than the limit"
                self._story.tell(
                    self._clock(), gone.conversation, "delete", f"{len(gone.tokens)} tokens from {LEVEL_NAME}: {reason}"
                )
        disk.remove_now(serials, why)

    def _use(self, entry: Conversation) -> None:
        """It was used now: the ones that go are those unused longest."""
        index, now = self.disk.index, self._clock()
        index.remove_conversations([entry.serial])
        index.add_conversation(replace(entry, stamp_s=now))
        if now - self._stamped_s.get(entry.serial, now) > RESTAMP_S:
            self._stamped_s[entry.serial] = now
            watched(self._restamp(entry, now), "noting the use of a system prompt", self._tasks)

    async def _restamp(self, entry: Conversation, now: float) -> None:
        """Write the time of use into the manifest, for the next start."""
        disk = self.disk
        disk.index.lease(entry.objects)
        try:
            manifest = await asyncio.wrap_future(disk.reader.manifest(entry.serial))
            if not isinstance(manifest, Manifest):
                log.warning("%s: the use of a system prompt is not noted: %s", disk.name, manifest.reason)
                return
            stamped = msgspec.structs.replace(manifest, stamp_s=now)
            await asyncio.wrap_future(disk.writer.commit(_RESTAMP_TICKET, stamped, ids_only=True))
            if not disk.index.has_conversation(entry.serial):  # it went meanwhile
                await asyncio.wrap_future(disk.writer.drop([entry.serial], ()))
        finally:
            disk.release(entry.objects)

    # ----------------------------------------------------------------------------------------------------------- status

    def status(self) -> dict[str, object]:
        """For /v1/status: no text, no token, no client's key."""
        return {
            "most": self.limits.most,
            "max_age_s": self.limits.max_age_s,
            "variants": len(self.disk.index.conversations()),
            "bytes": self.disk.used_bytes,
            "evicted_by_space": self.disk.counters.disk_evictions,
            "evicted_by_age": self.disk.counters.age_evictions,
            **asdict(self.counters),
        }
