"""Which stored prefix a request gets: the longest that RAM, a disk level or the system-prompt cache has (SPEC §2).

Covers the rules of a hit (long enough, similar enough, worth it, admitted by memory) and counting it. Changes no level;
bringing what was found into a slot is ladder.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from strata.cache.admission import Admission
from strata.cache.counters import CacheCounters
from strata.cache.disk import DiskLevel
from strata.cache.ladder import Found, Ladder
from strata.cache.ram import RamLevel
from strata.cache.restoring import need_bytes
from strata.cache.system_prompts import SystemPrompts
from strata.engine.interface import Engine
from strata.types import Key, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRules:
    """The weakest hit that is accepted: more than `similarity` of the prompt, and at least `n_min` tokens."""

    similarity: float = 0.0
    n_min: int = 0

    def accept(self, found: Found, tokens: Tokens, beyond: int) -> bool:
        return found.upto >= max(1, beyond, self.n_min) and found.upto > self.similarity * len(tokens)


class Lookup:
    """Asks the indexes of all levels."""

    def __init__(
        self,
        *,
        engine: Engine,
        ram: RamLevel | None,
        disks: Sequence[DiskLevel],
        system_prompts: SystemPrompts | None,
        rules: HitRules,
        ladder: Ladder,
        admission: Admission,
        counters: CacheCounters,
    ) -> None:
        """`disks`: fast to slow."""
        self._engine = engine
        self._ram = ram
        self._disks = tuple(disks)
        self._system_prompts = system_prompts
        self._rules = rules
        self._ladder = ladder
        self._admission = admission
        self._counters = counters

    def __repr__(self) -> str:
        return f"Lookup({self._counters.lookups} so far, {self._rules})"

    def find(self, root: Key, tokens: Tokens, *, beyond: int, held: int | None) -> Found | None:
        """See `ConversationCache.lookup`."""
        found = [self._found(root, tokens, None)] if self._ram is not None else []
        for disk in self._disks:
            match = self._found(root, tokens, disk)
            if not found or match.upto > found[0].upto:
                found.insert(0, match)
        self._counters.lookups += 1
        candidates = [*found[:1], *(other for other in found[1:] if other.disk is None)]
        for best in (*self._system_prompt(root, tokens, beyond, candidates), *candidates):
            if self._rules.accept(best, tokens, beyond) and self._is_taken(best, held):
                self._counters.hits += 1
                self._counters.ram_hits += best.disk is None
                return best
            if self._system_prompts is not None and best.disk is self._system_prompts.disk:
                self._system_prompts.miss()
        self._counters.misses += 1
        return None

    def deepest(self, root: Key, tokens: Tokens) -> Found | None:
        """Of memory that cannot be cut: what a slot that holds all of `tokens` but the last can be brought back to."""
        levels = [None, *self._disks] if self._ram is not None else list(self._disks)
        found = (self._found(root, tokens, disk) for disk in levels)
        best = max(found, key=lambda one: one.upto, default=None)
        return best if best is not None and best.upto else None

    def _system_prompt(self, root: Key, tokens: Tokens, beyond: int, others: Sequence[Found]) -> Iterator[Found]:
        """The system prompt alone, if it is kept and reaches beyond everything else."""
        if self._system_prompts is None:
            return
        beyond = max(beyond, *(other.upto + 1 for other in others), 1)
        match = self._system_prompts.ask(root, tokens, beyond=beyond)
        if match.upto:
            yield Found(root=root, tokens=tokens, match=match, disk=self._system_prompts.disk)

    def _found(self, root: Key, tokens: Tokens, disk: DiskLevel | None) -> Found:
        level = disk if disk is not None else self._ram
        assert level is not None, "asked for a level that is on"
        index = level.index
        match = index.lookup(root, tokens) if self._engine.info.cuttable else index.resume_point(root, tokens)
        return Found(root=root, tokens=tokens, match=match, disk=disk)

    def _is_taken(self, found: Found, held: int | None) -> bool:
        """Whether a hit is restored: it pays, and memory admits it."""
        if held is not None and not self._ladder.pays(found, held):
            return False
        if found.disk is None:
            return True
        need = need_bytes(self._engine, found.match)
        if self._system_prompts is not None and found.disk is self._system_prompts.disk:
            return self._system_prompts.admits(need)
        return self._admission.read("conversation", need).admitted
