"""Cuts, keys and prefixes: the properties DESIGN §3 promises."""

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.rules import prefix
from strata.types import SEGMENT_TOKENS

ids = st.lists(st.integers(0, 2**31 - 1), max_size=900).map(lambda x: np.array(x, np.int32))
ROOT = prefix.root_key(b"model" * 6, "")


def keys_of(tokens, frontier=None, root=ROOT):
    return [s.key for s in prefix.chain(root, tokens, prefix.cuts(len(tokens), frontier))]


@pytest.mark.parametrize(
    ("n", "frontier", "expected"),
    [
        (0, None, ()),
        (1, None, (1,)),
        (255, None, (255,)),
        (256, None, (256,)),
        (257, None, (256, 257)),
        (600, 520, (256, 512, 520, 600)),
        (600, 512, (256, 512, 600)),  # on a multiple: already a cut
        (600, 300, (256, 512, 600)),  # before the last multiple: no cut
        (600, 600, (256, 512, 600)),
        (512, 400, (256, 512)),
        (100, 40, (40, 100)),
        (100, 0, (100,)),
    ],
)
def test_cuts_are_multiples_then_frontier_then_end(n, frontier, expected):
    assert prefix.cuts(n, frontier) == expected


@given(n=st.integers(0, 5000), frontier=st.none() | st.integers(0, 5000))
def test_cuts_ascend_cover_everything_and_bound_the_tail(n, frontier):
    ends = prefix.cuts(n, frontier)
    assert list(ends) == sorted(set(ends))
    assert (ends[-1] if ends else 0) == n
    assert all(b - a <= SEGMENT_TOKENS for a, b in zip((0, *ends), ends, strict=False))
    assert sum(end % SEGMENT_TOKENS != 0 for end in ends) <= 2


@given(head=ids, a=ids, b=ids)
def test_the_same_prefix_has_the_same_cuts_and_keys_whatever_follows(head, a, b):
    one, two = np.concatenate([head, a]), np.concatenate([head, b])
    full = prefix.shared_prefix(one, two) // SEGMENT_TOKENS
    assert keys_of(one)[:full] == keys_of(two)[:full]


@given(tokens=ids.filter(len), data=st.data())
def test_a_key_changes_when_any_earlier_token_changes(tokens, data):
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = tokens.copy()
    changed[at] ^= 1
    for segment, other in zip(
        prefix.chain(ROOT, tokens, prefix.cuts(len(tokens))),
        prefix.chain(ROOT, changed, prefix.cuts(len(tokens))),
        strict=True,
    ):
        assert (segment.key == other.key) == (segment.end <= at)


@given(tokens=ids.filter(len))
def test_identity_and_namespace_change_every_key(tokens):
    keys = set(keys_of(tokens))
    for root in (prefix.root_key(b"model" * 6, "a"), prefix.root_key(b"other" * 6, "")):
        assert keys.isdisjoint(keys_of(tokens, root=root))


def test_fields_are_framed():
    assert prefix.root_key(b"ab", "c") != prefix.root_key(b"a", "bc")
    arrays = [np.array(x, np.int32) for x in ([1, 23], [12, 3], [256], [1, 0], [], [0], [0, 0])]
    keys = {prefix.next_key(ROOT, a) for a in arrays}
    assert len(keys) == len(arrays)
    images = [((b"ab", b"c"), (b"a", b"bc")), ((b"",), ())]
    for one, two in images:
        assert prefix.next_key(ROOT, arrays[0], one) != prefix.next_key(ROOT, arrays[0], two)


def test_image_keys_do_not_collide():
    tokens = np.zeros(4, np.int32)
    keys = {prefix.next_key(ROOT, tokens, (i.to_bytes(4, "little"),)) for i in range(100_000)}
    assert len(keys) == 100_000 and all(len(k) >= 16 for k in keys)


@pytest.mark.parametrize("seed", ["0", "1", None])
def test_keys_are_equal_in_every_process(seed, monkeypatch):
    code = (
        "import numpy as np; from strata.rules import prefix as p; t=np.arange(700,dtype=np.int32);"
        "print(p.chain(p.root_key(b'm'*32,'ns'),t,p.cuts(700,650))[-1].key.hex())"
    )
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    tokens = np.arange(700, dtype=np.int32)
    assert out == prefix.chain(prefix.root_key(b"m" * 32, "ns"), tokens, prefix.cuts(700, 650))[-1].key.hex()


@given(a=ids, b=ids)
def test_shared_prefix_against_a_plain_loop(a, b):
    expected = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        expected += 1
    assert prefix.shared_prefix(a, b) == expected


def test_frontier_is_the_last_opener_behind_position_zero():
    tokens = np.array([1, 5, 1, 6, 1, 7], np.int32)
    assert prefix.frontier(tokens, {1}) == 4
    assert prefix.frontier(tokens[:2], {1}) is None
    assert prefix.frontier(tokens, ()) is None
    assert prefix.frontier(np.array([9, 2, 3], np.int32), {2, 3}) == 2


def test_conversation_key_ignores_everything_from_the_third_opener_on():
    def key(tokens, openers=(1,)):
        return prefix.conversation_key(ROOT, np.array(tokens, np.int32), openers)

    assert key([1, 8, 1, 9, 1, 5]) == key([1, 8, 1, 9, 1, 6, 6, 1])
    assert key([1, 8, 1, 9, 1]) != key([1, 8, 1, 7, 1])
    assert key([4, 1, 8, 1, 9, 1, 5]) == key([4, 1, 8, 1, 9, 1, 7])  # a BOS before the first opener
    assert key([5] * 4096 + [1], ()) == key([5] * 4096 + [2], ())
    assert key([5] * 4095 + [1], ()) != key([5] * 4095 + [2], ())


@given(start=st.integers(0, 5000), n=st.integers(1, 256), block=st.integers(1, 256))
def test_blocks_tile_the_segment(start, n, block):
    ranges = prefix.blocks(start, start + n, block)
    assert ranges[0][0] == start and ranges[-1][1] == start + n
    assert all(a < b <= a + block for a, b in ranges)
    assert all(x[1] == y[0] for x, y in pairwise(ranges))
