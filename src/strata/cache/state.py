"""The index of one level: the only mutable truth about what it holds. No I/O, no clock, no threads.

Every slow move is a pair of calls around it: the segments it relies on are leased before and released after. Reference
counts are derived from the conversations; `check()` recounts everything.

Lookup is by chained keys over the full segments (one dict access each), then by token order among the children of the
last one: the children of a key are kept sorted by their tokens, so the longest shared prefix is a neighbour.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise

import numpy as np

from strata.cache.checkpoint_index import CheckpointIndex
from strata.cache.entries import NO_MATCH, Conversation, HeldCheckpoint, HeldSegment, Match
from strata.rules.checkpoints import outlive
from strata.rules.eviction import Evictable, Eviction, plan_eviction
from strata.rules.prefix import next_key, shared_prefix
from strata.types import SEGMENT_TOKENS, Key, Segment, StageShape, Tokens

NEWEST = 1 << 62  # later than any state is parked


class LevelIndex:
    """What one level holds: conversations, segments, leases."""

    def __init__(self) -> None:
        self.root_of: Callable[[Tokens], int | None] = lambda _: None
        """Where a state of these tokens has its root, as a checkpoint (rules/checkpoints.py)."""
        self._segments: dict[Key, HeldSegment] = {}
        self._checkpoints = CheckpointIndex()
        self._bytes: dict[Key, int] = {}  # every segment and checkpoint on disk, usable or not
        self._conversations: dict[int, Conversation] = {}
        self._references: Counter[Key] = Counter()
        self._leases: Counter[Key] = Counter()
        self._serials_by_conversation: dict[bytes, set[int]] = {}
        self._last_keys: Counter[Key] = Counter()
        self._children: dict[Key, list[tuple[bytes, Key]]] = {}
        # Pieces that end at a frontier and have a child: their lengths, counted under their parent.
        self._pieces: dict[Key, Segment] = {}
        self._piece_lengths: dict[Key, Counter[int]] = {}

    def __repr__(self) -> str:
        return f"LevelIndex({len(self._conversations)} conversations, {len(self._segments)} segments)"

    # ------------------------------------------------------------------------------------------------------- reading

    def lookup(self, root: Key, tokens: Tokens, *others: LevelIndex) -> Match:
        """The longest stored prefix of `tokens`, never all of it; with `others` pieced together. Changes nothing."""
        levels = (self, *others)
        tokens = tokens[: max(0, len(tokens) - 1)]
        path: list[HeldSegment] = []
        parent, at = root, 0
        while at + SEGMENT_TOKENS <= len(tokens):
            key = next_key(parent, tokens[at : at + SEGMENT_TOKENS])
            held = next((found for level in levels if (found := level.held(key)) is not None), None)
            if held is None:
                break
            path.append(held)
            parent, at = held.key, held.segment.end
        tail, upto = max((level._longest_tail(parent, at, tokens) for level in levels), key=lambda found: found[1])
        return Match(path=(*path, *tail), upto=upto) if path or tail else NO_MATCH

    def resume_point(self, root: Key, tokens: Tokens) -> Match:
        """`lookup` for memory that cannot be cut: up to the deepest checkpoint that the longest prefix reaches."""
        found = self.lookup(root, tokens)
        usable = self.checkpoints_along(root, tokens[: found.upto])
        if not usable:
            return NO_MATCH
        upto = usable[-1].position
        path = tuple(held for held in found.path if held.segment.start < upto)
        return Match(path=path, upto=upto, checkpoint=usable[-1])

    def checkpoints_along(self, root: Key, tokens: Tokens) -> tuple[HeldCheckpoint, ...]:
        """The usable checkpoints of prefixes of `tokens`, all of it included, ascending."""
        return self._checkpoints.along(root, tokens)

    def _longest_tail(self, parent: Key, at: int, tokens: Tokens) -> tuple[list[HeldSegment], int]:
        """Segments behind `parent` that share most tokens with `tokens[at:]`, and the position they reach."""
        rest = tokens[at : at + SEGMENT_TOKENS]
        nearest, shared = self._nearest_child(parent, rest)
        best = ([nearest] if nearest is not None else [], at + shared)
        for length in self._piece_lengths.get(parent, ()):
            if length > len(rest):
                continue
            piece = self._segments.get(next_key(parent, rest[:length]))
            if piece is None:
                continue
            behind, more = self._nearest_child(piece.key, rest[length:])
            if behind is not None and at + length + more > best[1]:
                best = ([piece, behind], at + length + more)
        return best

    def _nearest_child(self, parent: Key, rest: Tokens) -> tuple[HeldSegment | None, int]:
        """The child of `parent` with the longest common prefix with `rest`, and that length; None when it is 0."""
        children = self._children.get(parent)
        if not children or not len(rest):
            return None, 0
        wanted = _sortable(rest)
        at = bisect_left(children, (wanted, b""))
        best, best_shared = None, 0
        for tokens, key in children[max(0, at - 1) : at + 1]:
            shared = _shared_ids(tokens, wanted)
            if shared > best_shared:
                best, best_shared = key, shared
        return (self._segments[best], best_shared) if best is not None else (None, 0)

    def holds(self, key: Key) -> bool:
        """Whether the segment or checkpoint is durable and can be used."""
        return key in self._segments or key in self._checkpoints

    def usable_checkpoints(self, serial: int) -> tuple[tuple[int, Key], ...]:
        """Position and key of the checkpoints of a conversation that can be used, ascending."""
        named = self._conversations[serial].checkpoints
        return tuple((position, key) for position, key in named if key in self._checkpoints)

    def held(self, key: Key) -> HeldSegment | None:
        """The segment, if it is durable and can be used. Another object once it was lost and written anew."""
        return self._segments.get(key)

    def is_named(self, key: Key) -> bool:
        """Whether a stored conversation names the segment, usable or not."""
        return self._references[key] > 0

    def bytes_of(self, key: Key) -> int:
        """What the segment's files take on disk; 0 for an unknown one."""
        return self._bytes.get(key, 0)

    def stores(self, keys: Sequence[Key]) -> bool:
        """Whether one conversation ends where this chain of segments ends, and all of it can be used.

        Behind the segments, checkpoints that must be there as well.
        """
        if not all(map(self.holds, keys)):
            return False
        last = next(key for key in reversed(keys) if key in self._segments)
        return self._last_keys[last] > 0

    def conversations(self) -> tuple[Conversation, ...]:
        return tuple(self._conversations.values())

    def conversation(self, serial: int) -> Conversation:
        return self._conversations[serial]

    def has_conversation(self, serial: int) -> bool:
        return serial in self._conversations

    def names_alone(self, key: Key) -> bool:
        """Whether exactly one stored conversation names the segment."""
        return self._references[key] == 1

    def segment_count(self) -> int:
        return len(self._segments)

    def is_leased(self, keys: Iterable[Key]) -> bool:
        """Whether any of these segments is being read or written."""
        return any(self._leases[key] for key in keys)

    def superseded_by(
        self, conversation: bytes, root: Key, tokens: Tokens, *, longest: int | None = None, born: int = NEWEST
    ) -> tuple[int, ...]:
        """Serials of stored states of the same conversation whose frontier chain is a prefix of `tokens` (SPEC §6).

        `longest`: spare states of more tokens than this. Those parked later than `born` are spared too.
        """
        found: list[int] = []
        for old in self._same(conversation, root):
            spared = old.born > born or (longest is not None and len(old.tokens) > longest)
            if not spared and old.is_continued_by(tokens):
                found.append(old.serial)
        return tuple(sorted(found))

    def is_outdated(self, entry: Conversation, keep: int = 0) -> bool:
        """Whether a state that was parked later, and is no shorter, supersedes this one. `keep`: see `outlives`."""
        later = (c for c in self._same(entry.conversation, entry.root) if c.born > entry.born)
        longer = (c for c in later if len(c.tokens) >= len(entry.tokens) and entry.is_continued_by(c.tokens))
        return any(not keep or not self.outlives(entry, c, keep) for c in longer)

    def outlives(self, old: Conversation, newer: Conversation, keep: int) -> bool:
        """Whether `old` has checkpoints that `newer`, which goes on from it, lacks and would keep, keeping `keep`."""
        if not old.checkpoints:
            return False
        positions = [at for at, _ in self.usable_checkpoints(old.serial)]
        others = [at for at, _ in newer.checkpoints]
        shared, root = shared_prefix(old.tokens, newer.tokens), self.root_of(newer.tokens)
        return outlive(positions, others, shared=shared, root=root, keep=keep)

    def _same(self, conversation: bytes, root: Key) -> list[Conversation]:
        serials = self._serials_by_conversation.get(conversation, ())
        return [c for c in map(self._conversations.__getitem__, serials) if c.root == root]

    def oldest_beyond(self, conversation: bytes, keep: int) -> tuple[int, ...]:
        """Serials of the states of a conversation but for the newest `keep`; none when `keep` is 0."""
        serials = self._serials_by_conversation.get(conversation, set()) if keep else set()
        newest = sorted((self._conversations[s] for s in serials), key=lambda c: (c.stamp_s, c.serial), reverse=True)
        return tuple(c.serial for c in newest[keep:])

    def compacted_by(
        self, conversation: bytes, root: Key, tokens: Tokens, limit: int, *, born: int = NEWEST
    ) -> tuple[int, ...] | None:
        """Serials of states of the same conversation that `tokens` rewrote so early that they can be no hit (SPEC §6).

        They share fewer than `limit` tokens with it and are at least that long themselves: of shorter ones nobody can
        tell a rewrite from an edit, nor of those parked later than `born`. None when two of them share equally much and
        then differ: their owner is unclear.
        """
        found: list[tuple[int, Conversation]] = []
        for old in self._same(conversation, root):
            shared = shared_prefix(old.tokens, tokens)
            extends = shared >= (old.frontier or len(old.tokens)) or shared == len(tokens)
            if old.born <= born and not extends and shared < limit <= len(old.tokens):
                found.append((shared, old))
        found.sort(key=lambda pair: pair[0])
        for (shared, old), (next_shared, other) in pairwise(found):
            alike = shared_prefix(old.tokens, other.tokens)
            if shared == next_shared and alike < min(len(old.tokens), len(other.tokens)):
                return None
        return tuple(sorted(old.serial for _, old in found))

    def plan_eviction(
        self,
        *,
        used_bytes: int,
        need_bytes: int,
        budget_bytes: int,
        too_many: int = 0,
        coming: Collection[Key] = (),
        leaving: Collection[int] = (),
        rank: Callable[[Conversation], int | None] = lambda _: 0,
    ) -> Eviction:
        """What must go so that `need_bytes` more fit the budget (rules/eviction.py). `rank` None spares an entry;
        those `leaving` count as gone already, with the segments that only they name."""
        references, sizes = self._references, self._bytes
        if leaving:
            references = self._references - self._named_by(leaving)
            sizes = {key: n for key, n in sizes.items() if references[key] or not self._references[key]}
        entries = (
            Evictable(serial=c.serial, stamp_s=c.stamp_s, manifest_bytes=c.manifest_bytes, keys=c.objects, rank=order)
            for c in self._conversations.values()
            if c.serial not in leaving and (order := rank(c)) is not None
        )
        return plan_eviction(
            conversations=entries,
            segment_bytes=sizes,
            references=references,
            leased={key for key, n in self._leases.items() if n},
            used_bytes=used_bytes,
            need_bytes=need_bytes,
            budget_bytes=budget_bytes,
            too_many=too_many,
            coming=coming,
        )

    def bytes_named_by(self, serials: Collection[int], *, alone: bool) -> int:
        """What these conversations take on disk; `alone`: but for segments that others name too."""
        keys = (key for key, n in self._named_by(serials).items() if not alone or n == self._references[key])
        known = (self._conversations[s] for s in serials if s in self._conversations)
        return sum(map(self.bytes_of, keys)) + sum(c.manifest_bytes for c in known)

    def _named_by(self, serials: Collection[int]) -> Counter[Key]:
        known = (self._conversations[s] for s in serials if s in self._conversations)  # others have vanished
        return Counter(key for c in known for key in c.objects)

    # ------------------------------------------------------------------------------------------------------- changing

    def lease(self, keys: Iterable[Key]) -> None:
        """Keep these segments from eviction until `release`."""
        self._leases.update(keys)

    def release(self, keys: Iterable[Key]) -> None:
        self._leases.subtract(keys)
        self._leases += Counter()  # drops what is no longer leased

    def note_bytes(self, key: Key, n_bytes: int) -> None:
        """Record that a segment's files take `n_bytes` on disk, whether it can be used or not."""
        self._bytes[key] = n_bytes

    def add_segment(self, segment: Segment, tokens: Tokens, n_bytes: int, stages: tuple[StageShape, ...] = ()) -> None:
        """Record a durable segment; `tokens` are its own ids. One that is held already keeps its place."""
        self._bytes[segment.key] = n_bytes
        if segment.key in self._segments:
            return
        held = HeldSegment(segment=segment, sort_tokens=_sortable(tokens), stages=stages)
        self._segments[segment.key] = held
        insort(self._children.setdefault(segment.parent, []), (held.sort_tokens, segment.key))
        self._track_piece(segment.parent)
        self._track_piece(segment.key)

    def add_checkpoint(self, key: Key, file_bytes: int, *, n_bytes: int, place: tuple[Key, int]) -> None:
        """Record a durable checkpoint. `n_bytes`: of its payload. `place`: see Manifest.place_of."""
        self._bytes[key] = file_bytes
        self._checkpoints.add(key, n_bytes, place)

    def add_conversation(self, conversation: Conversation) -> None:
        """Record a durable manifest; what it names gains a reference."""
        if conversation.serial in self._conversations:
            raise ValueError(f"serial {conversation.serial} is already in the index")
        self._conversations[conversation.serial] = conversation
        self._references.update(conversation.objects)
        self._serials_by_conversation.setdefault(conversation.conversation, set()).add(conversation.serial)
        self._last_keys[conversation.keys[-1]] += 1

    def remove_conversations(self, serials: Sequence[int]) -> tuple[Key, ...]:
        """Forget manifests; returns what is on disk, unleased, and named by nothing any more (it stays indexed)."""
        loose: list[Key] = []
        for serial in serials:
            gone = self._conversations.pop(serial)
            same = self._serials_by_conversation[gone.conversation]
            same.discard(serial)
            if not same:
                del self._serials_by_conversation[gone.conversation]
            self._last_keys[gone.keys[-1]] -= 1
            self._references.subtract(gone.objects)
            loose.extend(key for key in gone.objects if key in self._bytes)
        self._references += Counter()
        self._last_keys += Counter()
        return tuple(key for key in dict.fromkeys(loose) if not self._references[key] and not self._leases[key])

    def remove_segments(self, keys: Iterable[Key]) -> None:
        """Forget segments and checkpoints (deleted or set aside); conversations are usable up to the gap."""
        for key in keys:
            self._bytes.pop(key, None)
            self._checkpoints.discard(key)
            held = self._segments.pop(key, None)
            if held is None:
                continue
            siblings = self._children[held.segment.parent]
            siblings.remove((held.sort_tokens, key))
            if not siblings:
                del self._children[held.segment.parent]
            self._track_piece(held.segment.parent)
            self._track_piece(key)

    def _track_piece(self, key: Key) -> None:
        """Bring the piece tables up to date after a change of the segment `key` or of its children."""
        held = self._segments.get(key)
        is_piece = held is not None and held.segment.end % SEGMENT_TOKENS != 0 and key in self._children
        if is_piece == (key in self._pieces):
            return
        if held is not None and is_piece:
            self._pieces[key] = held.segment
            self._piece_lengths.setdefault(held.segment.parent, Counter())[held.segment.n_tokens] += 1
            return
        segment = self._pieces.pop(key)
        lengths = self._piece_lengths[segment.parent]
        lengths[segment.n_tokens] -= 1
        if not lengths[segment.n_tokens]:
            del lengths[segment.n_tokens]
        if not lengths:
            del self._piece_lengths[segment.parent]

    # ------------------------------------------------------------------------------------------------------- checking

    def check(self) -> list[str]:
        """Every inconsistency found, in words; empty when all is well."""
        wrong: list[str] = []
        if Counter(key for c in self._conversations.values() for key in c.objects) != +self._references:
            wrong.append("reference counts differ from a recount over the conversations")
        if Counter(c.keys[-1] for c in self._conversations.values()) != +self._last_keys:
            wrong.append("the table of last keys differs from the conversations")
        if not self._segments.keys() | self._checkpoints.keys() <= self._bytes.keys():
            wrong.append("a usable segment or checkpoint has no size")
        children = Counter((h.segment.parent, h.key) for h in self._segments.values())
        if children != Counter((parent, key) for parent, pairs in self._children.items() for _, key in pairs):
            wrong.append("the children table differs from the segments")
        if any(pairs != sorted(pairs) for pairs in self._children.values()):
            wrong.append("children of a segment are out of order")
        pieces = {
            h.key for h in self._segments.values() if h.segment.end % SEGMENT_TOKENS != 0 and h.key in self._children
        }
        if pieces != self._pieces.keys():
            wrong.append("the pieces table differs from the segments")
        if any(n < 0 for n in self._leases.values()):
            wrong.append("a lease count is negative")
        if {s for serials in self._serials_by_conversation.values() for s in serials} != set(self._conversations):
            wrong.append("the conversation table differs from the manifests")
        return wrong


def _sortable(tokens: Tokens) -> bytes:
    return np.ascontiguousarray(tokens, dtype=">u4").tobytes()


def _shared_ids(a: bytes, b: bytes) -> int:
    """Leading token ids that two sortable lists have in common."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.frombuffer(a[:n], ">u4") != np.frombuffer(b[:n], ">u4"))
    return int(differ[0]) if differ.size else n // 4
