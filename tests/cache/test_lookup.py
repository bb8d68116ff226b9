"""The index of a level against a plain oracle: any conversations, any losses, any prompt.

The oracle walks every chain that was ever stored and takes the longest prefix that is held without a gap.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.cache.entries import NO_MATCH, Conversation
from strata.cache.state import LevelIndex
from strata.rules import prefix
from strata.rules.prefix import chain, cuts, shared_prefix
from strata.types import Key, Segment, Tokens

ROOTS = (prefix.root_key(b"f" * 32, "one"), prefix.root_key(b"f" * 32, "two"))
TRUNKS = tuple(np.random.default_rng(seed).integers(0, 2, 1100).astype(np.int32) for seed in range(3))
"""Long texts of a tiny alphabet: they share short prefixes by accident, and all of their length with themselves."""
LENGTHS = (0, 1, 2, 100, 254, 255, 256, 257, 300, 510, 511, 512, 513, 600, 767, 768, 769, 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """`n` tokens of a trunk, then a tail of its own."""

    trunk: int
    n: int
    tail: bytes

    @property
    def tokens(self) -> Tokens:
        own = np.frombuffer(self.tail, np.uint8).astype(np.int32)
        return np.concatenate([TRUNKS[self.trunk][: self.n], own % 3])


@dataclass(slots=True, kw_only=True)
class Oracle:
    """What was stored, as plainly as can be."""

    chains: list[tuple[Key, Tokens, tuple[Segment, ...]]] = field(default_factory=list)
    held: set[Key] = field(default_factory=set)

    def longest(self, root: Key, prompt: Tokens) -> int:
        best = 0
        for owner, tokens, segments in self.chains:
            end = 0
            for segment in segments:
                if segment.key not in self.held:
                    break
                end = segment.end
            if owner == root:
                best = max(best, min(shared_prefix(tokens, prompt), end, max(0, len(prompt) - 1)))
        return best


OWN = (b"\1" * 10, b"\0" * 255, b"\1" * 256, b"\1" * 300, b"\2" * 40)
texts = st.builds(
    Text,
    trunk=st.integers(0, len(TRUNKS) - 1),
    n=st.sampled_from(LENGTHS),
    tail=st.binary(min_size=1, max_size=6) | st.sampled_from(OWN),
)
numbers = st.integers(0, 1 << 20)
operations = st.lists(st.tuples(st.sampled_from("sssslleklll"), numbers, numbers), min_size=5, max_size=30)


def store(index: LevelIndex, oracle: Oracle, serial: int, root: Key, tokens: Tokens, frontier: int | None) -> None:
    segments = chain(root, tokens, cuts(len(tokens), frontier))
    for segment in segments:
        index.add_segment(segment, tokens[segment.start : segment.end], 4096 + segment.n_tokens)
    index.add_conversation(conversation(serial, root, tokens, frontier, segments))
    oracle.chains.append((root, tokens, segments))
    oracle.held |= {segment.key for segment in segments}


def conversation(
    serial: int, root: Key, tokens: Tokens, frontier: int | None, segments: tuple[Segment, ...]
) -> Conversation:
    return Conversation(
        serial=serial,
        root=root,
        conversation=prefix.conversation_key(root, tokens, (2,)),
        tokens=tokens,
        frontier=frontier or 0,
        keys=tuple(segment.key for segment in segments),
        manifest_bytes=4096,
        stamp_s=float(serial),
    )


def check_look(index: LevelIndex, oracle: Oracle, root: Key, prompt: Tokens) -> None:
    match = index.lookup(root, prompt)
    assert match.upto == oracle.longest(root, prompt)
    if match.upto == 0:
        assert match == NO_MATCH
        return
    parent, at = root, 0
    for held in match.path:
        assert (held.segment.parent, held.segment.start) == (parent, at)
        assert index.holds(held.key) and held.key in oracle.held
        parent, at = held.key, held.segment.end
    assert match.path[-1].segment.start < match.upto <= at
    stored = np.concatenate([held.tokens for held in match.path])
    assert np.array_equal(stored[: match.upto], prompt[: match.upto])


@settings(max_examples=300, deadline=None)
@given(st.lists(texts, min_size=2, max_size=5), operations)
def test_lookup_is_the_longest_prefix_held(pool: list[Text], ops: list[tuple[str, int, int]]) -> None:
    index, oracle = LevelIndex(), Oracle()
    for serial, (op, a, b) in enumerate(ops, 1):
        root, tokens = ROOTS[a % len(ROOTS)], pool[b % len(pool)].tokens
        live = index.conversations()
        if op == "s":  # store; the frontier is any position, or none
            store(index, oracle, serial, root, tokens, a % (len(tokens) + 1) or None)
        elif op == "l" and oracle.held:  # lose a segment
            key = sorted(oracle.held)[a % len(oracle.held)]
            index.remove_segments([key])
            oracle.held.discard(key)
        elif op in "ek" and live:  # end a conversation; keep its segments, or not
            gone = live[a % len(live)]
            loose = index.remove_conversations([gone.serial])
            named = {key for c in index.conversations() for key in c.keys}
            assert set(loose) == {key for key in gone.keys if key in oracle.held} - named
            if op == "e":
                index.remove_segments(loose)
                oracle.held -= set(loose)
        assert index.check() == []
        assert index.segment_count() == len(oracle.held)
        check_look(index, oracle, root, tokens)
    for root, tokens, segments in oracle.chains:  # every stored state finds itself, but for its last token
        check_look(index, oracle, root, tokens)
        keys = [segment.key for segment in segments]
        ends_here = any(c.keys[-1] == keys[-1] for c in index.conversations())
        assert index.stores(keys) == (ends_here and set(keys) <= oracle.held)
        assert all(index.is_named(k) == any(k in c.keys for c in index.conversations()) for k in keys)


def test_lookup_changes_nothing() -> None:
    index, oracle = LevelIndex(), Oracle()
    store(index, oracle, 1, ROOTS[0], TRUNKS[0][:700], 650)
    before = repr(vars(index))
    for n in LENGTHS:
        index.lookup(ROOTS[0], TRUNKS[0][:n])
    assert repr(vars(index)) == before


def test_every_position_of_a_conversation_can_be_reached() -> None:
    index, oracle = LevelIndex(), Oracle()
    tokens = TRUNKS[0][:700]
    store(index, oracle, 1, ROOTS[0], tokens, 650)
    for n in range(1, len(tokens)):
        prompt = tokens[: n + 1].copy()
        prompt[n] = 9  # differs at n
        assert index.lookup(ROOTS[0], prompt).upto == n, n


def test_the_other_namespace_is_never_found() -> None:
    index, oracle = LevelIndex(), Oracle()
    store(index, oracle, 1, ROOTS[0], TRUNKS[0], None)
    assert index.lookup(ROOTS[1], TRUNKS[0]) == NO_MATCH


@pytest.mark.parametrize("reply", [0, 1, 80, 300])
def test_a_reply_that_a_client_rewrites_is_found_up_to_its_frontier(reply: int) -> None:
    index, oracle = LevelIndex(), Oracle()
    stored = np.concatenate([TRUNKS[0][:600], np.full(reply, 7, np.int32)])
    store(index, oracle, 1, ROOTS[0], stored, 600)
    rewritten = np.concatenate([TRUNKS[0][:600], np.full(90, 8, np.int32)])
    assert index.lookup(ROOTS[0], rewritten).upto == 600


# ------------------------------------------------------------------------------------------------- what supersedes what


def test_a_longer_state_supersedes_the_shorter_ones_of_its_conversation_only() -> None:
    index, oracle = LevelIndex(), Oracle()
    store(index, oracle, 1, ROOTS[0], TRUNKS[0][:300], 290)
    store(index, oracle, 2, ROOTS[0], TRUNKS[0][:500], 480)
    sibling = np.concatenate([TRUNKS[0][:285], np.full(40, 5, np.int32)])
    store(index, oracle, 3, ROOTS[0], sibling, 300)
    store(index, oracle, 4, ROOTS[1], TRUNKS[0][:300], 290)
    longer = TRUNKS[0][:900]
    key = prefix.conversation_key(ROOTS[0], longer, (2,))
    same = [s for s in (1, 2, 3, 4) if index.conversation(s).conversation == key]
    assert set(index.superseded_by(key, ROOTS[0], longer)) == set(same) - {3, 4}
    assert index.superseded_by(key, ROOTS[0], longer, longest=400) == tuple(s for s in same if s == 1)


# ------------------------------------------------------------------------------------------------------- check finds it


def filled() -> LevelIndex:
    index, oracle = LevelIndex(), Oracle()
    for serial, (n, frontier) in enumerate([(300, 290), (700, 650), (700, 600), (256, None)], 1):
        tokens = TRUNKS[0][:n].copy()
        tokens[-1] = 10 + serial
        store(index, oracle, serial, ROOTS[0], tokens, frontier)
    assert index.check() == []
    return index


def some_key(index: LevelIndex) -> Key:
    return index.conversation(2).keys[0]


def forget_one_of_two(index: LevelIndex) -> None:
    pairs = next(pairs for pairs in index._children.values() if len(pairs) > 1)
    pairs.reverse()


PLANTED = {
    "a reference too many": lambda index: index._references.update([some_key(index)]),
    "a reference too few": lambda index: index._references.subtract([some_key(index)]),
    "a last key too many": lambda index: index._last_keys.update([some_key(index)]),
    "a segment without a size": lambda index: index._bytes.pop(some_key(index)),
    "a segment that is nobody's child": lambda index: index._children.pop(ROOTS[0]),
    "children out of order": forget_one_of_two,
    "a forgotten piece": lambda index: index._pieces.popitem(),
    "a lease given back twice": lambda index: index._leases.subtract([some_key(index)]),
    "a conversation without its name": lambda index: index._serials_by_conversation.clear(),
    "a conversation that vanished": lambda index: index._conversations.pop(1),
    "a segment that vanished": lambda index: index._segments.pop(some_key(index)),
}


@pytest.mark.parametrize("what", PLANTED)
def test_check_finds_what_is_wrong(what: str) -> None:
    index = filled()
    PLANTED[what](index)
    assert index.check() != []
