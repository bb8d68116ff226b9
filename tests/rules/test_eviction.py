"""The eviction rule: oldest first, shared segments stay, leased ones are spared."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from strata.rules.eviction import Evictable, plan_eviction
from strata.types import Key


def key(n):
    return Key(bytes([n]) * 32)


def plan(entries, sizes, *, used=None, need=0, budget=0, leased=()):
    references = Counter(k for e in entries for k in e.keys)
    if used is None:
        used = sum(sizes.values()) + sum(e.manifest_bytes for e in entries)
    return plan_eviction(
        conversations=entries,
        segment_bytes=sizes,
        references=references,
        leased=set(leased),
        used_bytes=used,
        need_bytes=need,
        budget_bytes=budget,
    )


def entry(serial, stamp, *keys):
    return Evictable(serial=serial, stamp_s=stamp, manifest_bytes=1, keys=tuple(map(key, keys)))


def test_nothing_goes_while_everything_fits():
    assert plan([entry(1, 0, 1)], {key(1): 9}, budget=10).serials == ()
    assert plan([entry(1, 0, 1)], {key(1): 9}, budget=9).serials == (1,)


def test_oldest_first_and_only_as_many_as_needed():
    entries = [entry(1, 30, 1), entry(2, 10, 2), entry(3, 20, 3)]
    got = plan(entries, {key(n): 9 for n in (1, 2, 3)}, need=10, budget=30)
    assert (got.serials, got.keys, got.freed_bytes, got.short_bytes) == ((2,), (key(2),), 10, 0)


def test_a_shared_segment_goes_with_the_last_that_names_it():
    entries = [entry(1, 10, 1, 2), entry(2, 20, 1, 3)]
    sizes = {key(1): 100, key(2): 5, key(3): 5}
    assert plan(entries, sizes, need=0, budget=106).keys == (key(2),)
    assert set(plan(entries, sizes, budget=0).keys) == set(sizes)


def test_orphans_go_before_any_conversation():
    got = plan([entry(1, 10, 1)], {key(1): 9, key(2): 50}, budget=10)
    assert (got.serials, got.keys) == ((), (key(2),))


def test_a_leased_conversation_is_spared_and_the_shortage_told():
    entries = [entry(1, 10, 1), entry(2, 20, 2)]
    got = plan(entries, {key(1): 9, key(2): 9}, budget=0, leased=[key(1)])
    assert (got.serials, got.short_bytes) == ((2,), 10)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.integers(0, 12), min_size=1, max_size=4, unique=True)), max_size=8
    ),
    st.integers(0, 150),
    st.sets(st.integers(0, 12)),
)
def test_never_a_leased_or_still_named_segment(rows, budget, leased):
    entries = [entry(serial, stamp, *keys) for serial, (stamp, keys) in enumerate(rows)]
    sizes = {key(n): 10 for n in range(13)}
    got = plan(entries, sizes, budget=budget, leased=map(key, leased))
    kept = [e for e in entries if e.serial not in got.serials]
    assert not {k for e in kept for k in e.keys} & set(got.keys)
    assert not set(map(key, leased)) & set(got.keys)
    assert len(set(got.keys)) == len(got.keys)
    assert got.freed_bytes == 10 * len(got.keys) + len(got.serials)
