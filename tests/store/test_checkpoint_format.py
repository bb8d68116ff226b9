"""Checkpoints in keys, names, headers and manifests: round trips, and refusal of all that is not exactly right."""

from __future__ import annotations

import struct
import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.samples import ROOT, conversation

from strata.errors import DamagedFile
from strata.rules import prefix
from strata.store import names
from strata.store.format import (
    MAX_CHECKPOINT_BLOCKS,
    MAX_CHECKPOINT_BYTES,
    MAX_CHECKPOINTS,
    CheckpointEntry,
    CheckpointHeader,
    Manifest,
    SegmentHeader,
    decode_checkpoint_header,
    decode_header,
    decode_manifest,
    digest,
    encode_manifest,
    plan_checkpoint,
)
from strata.types import BLOCK_BYTES, PAGE, Key, pad_to_page

HEAD = struct.Struct("<8sQQ16s")
ENTRY = np.dtype([("position", "<u4"), ("n_bytes", "<u8")])
KEY = Key(bytes(range(32)))
WITH_CHECKPOINTS = conversation(1, 700, frontier=600, checkpoints=((100, 5000), (512, 9000), (600, 1), (700, 77)))
ROWLESS = conversation(2, 300, stages=(), checkpoints=((300, 9000),))


def filled(header: CheckpointHeader) -> CheckpointHeader:
    return header.with_digests([bytes([i % 255 + 1]) * 16 for i in range(len(header.blocks))])


HEADER = filled(plan_checkpoint(KEY, 512, 9000, block_bytes=PAGE))


# ----------------------------------------------------------------------------------------------------------------- keys

ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=600).map(lambda x: np.array(x, np.int32))


@given(tokens=ids, other=ids, data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_key_is_a_function_of_the_prefix_alone(tokens, other, data) -> None:
    position = data.draw(st.integers(1, len(tokens)))
    key = prefix.checkpoint_key(ROOT, tokens, position)
    assert key == prefix.checkpoint_key(ROOT, np.concatenate([tokens[:position], other]), position)
    changed = tokens.copy()
    changed[data.draw(st.integers(0, position - 1))] ^= 1
    assert key != prefix.checkpoint_key(ROOT, changed, position)
    assert key != prefix.checkpoint_key(prefix.root_key(bytes(32), "other"), tokens, position)
    assert len(key) == prefix.KEY_BYTES


@given(tokens=ids, data=st.data())
@settings(max_examples=60, deadline=None)
def test_who_walks_the_chain_has_the_key_for_one_more_hash(tokens, data) -> None:
    position = data.draw(st.integers(1, len(tokens)))
    chain = prefix.chain(ROOT, tokens[:position], prefix.cuts(position))
    key = prefix.checkpoint_key_at(chain[-1].key)
    assert key == prefix.checkpoint_key(ROOT, tokens, position)
    assert key not in {segment.key for segment in chain} | {ROOT}


@pytest.mark.parametrize("position", [-1, 0, 4])
def test_there_is_no_checkpoint_outside_of_the_tokens(position) -> None:
    with pytest.raises(ValueError, match="no checkpoint"):
        prefix.checkpoint_key(ROOT, np.arange(3, dtype=np.int32), position)


# ---------------------------------------------------------------------------------------------------------------- names


@given(st.binary(min_size=32, max_size=32))
def test_names_come_back_as_they_were(raw: bytes) -> None:
    path = names.checkpoint_path(Key(raw))
    assert names.parse_checkpoint_path(path) == raw
    assert names.parse_segment_path(path) is None
    assert names.parse_checkpoint_path(names.segment_path(Key(raw), 0)) is None


@pytest.mark.parametrize(
    "path",
    [
        "",
        "seg/aa/" + "ab" * 32 + ".ckpt",
        "ab/" + "ab" * 32 + ".ckpt",
        "seg/ab/" + "AB" * 32 + ".ckpt",
        "seg/ab/" + "ab" * 32 + ".ckpt\n",
        "seg/ab/" + "ab" * 32 + ".s0.ckpt",
        "seg/ab/" + "ab" * 31 + ".ckpt",
        "seg/ab/" + "ab" * 32 + ".ckpt.7-1.tmp",
    ],
)
def test_only_exact_paths_are_recognised(path: str) -> None:
    assert names.parse_checkpoint_path(path) is None


# -------------------------------------------------------------------------------------------------------------- headers


@given(
    key=st.binary(min_size=32, max_size=32),
    position=st.integers(1, 1 << 24),
    pages=st.integers(1, BLOCK_BYTES // PAGE),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_a_header_comes_back_as_it_was(key, position, pages, data) -> None:
    block_bytes = pages * PAGE
    n_bytes = data.draw(st.integers(1, MAX_CHECKPOINT_BLOCKS * block_bytes))
    planned = plan_checkpoint(Key(key), position, n_bytes, block_bytes=block_bytes)
    assert not planned.has_digests
    header = filled(planned)
    assert header.has_digests
    assert len(header.encode()) == PAGE
    assert decode_checkpoint_header(header.encode()) == header
    assert sum(block.length for block in header.blocks) == n_bytes
    assert header.file_bytes == header.blocks[-1].offset + pad_to_page(header.blocks[-1].length)
    assert header.path == names.checkpoint_path(Key(key))


def test_the_largest_checkpoint_fits_a_page() -> None:
    header = filled(plan_checkpoint(KEY, 1, MAX_CHECKPOINT_BYTES))
    assert MAX_CHECKPOINT_BYTES == 7 << 29, "3.5 GiB"
    assert decode_checkpoint_header(header.encode()) == header
    with pytest.raises(DamagedFile) as refused:
        plan_checkpoint(KEY, 1, MAX_CHECKPOINT_BYTES + 1)
    assert refused.value.field == "n_bytes"


def test_every_single_bit_flip_of_a_header_is_detected() -> None:
    data = HEADER.encode()
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedFile):
            decode_checkpoint_header(damaged)


RAW_FIELDS = [  # offset in the page, width, field that is named, values
    (48, 8, "position", (0, (1 << 24) + 1, 1 << 63)),
    (56, 8, "n_bytes", (0, MAX_CHECKPOINT_BLOCKS * PAGE + 1, 1 << 63)),
    (56, 8, "blocks", (1, 2 * PAGE, 3 * PAGE + 1, MAX_CHECKPOINT_BLOCKS * PAGE)),
    (64, 8, "block_bytes", (0, 1, PAGE + 1, BLOCK_BYTES + PAGE, 1 << 63)),
    (64, 8, "blocks", (2 * PAGE, BLOCK_BYTES)),
    (72, 8, "blocks", (0, 4, MAX_CHECKPOINT_BLOCKS, MAX_CHECKPOINT_BLOCKS + 1, 1 << 63)),
    (72, 8, "padding", (2,)),  # a digest lies behind the last one
    (PAGE - 24, 8, "padding", (1,)),
]


@pytest.mark.parametrize(("offset", "width", "field", "values"), RAW_FIELDS)
def test_a_damaged_field_under_a_right_checksum_is_named(offset, width, field, values) -> None:
    for value in values:
        page = bytearray(HEADER.encode())
        page[offset : offset + width] = value.to_bytes(width, "little")
        page[-16:] = digest(bytes(page[:-16]))
        tracemalloc.start()
        try:
            with pytest.raises(DamagedFile) as refused:
                decode_checkpoint_header(page)
            assert tracemalloc.get_traced_memory()[1] < 1 << 18, "bounded before anything is made of it"
        finally:
            tracemalloc.stop()
        assert refused.value.field == field


def test_each_check_names_its_field() -> None:
    first, second, third = HEADER.blocks
    change = msgspec.structs.replace
    cases = {
        "key": change(HEADER, key=Key(b"short")),
        "position": change(HEADER, position=0),
        "n_bytes": change(HEADER, n_bytes=0),
        "block_bytes": change(HEADER, block_bytes=100),
        "blocks": change(HEADER, blocks=(first, second)),
        "blocks.offset": change(HEADER, blocks=(first, change(second, offset=second.offset + PAGE), third)),
        "blocks.length": change(HEADER, blocks=(first, second, change(third, length=third.length - 1))),
        "blocks.digest": change(HEADER, blocks=(first, change(second, digest=b""), third)),
    }
    for field, damaged in cases.items():
        with pytest.raises(DamagedFile) as refused:
            damaged.encode()
        assert refused.value.field == field


@pytest.mark.parametrize("page", [b"", b"strata-c", HEADER.encode()[:-1], HEADER.encode() + b"\0", bytes(PAGE)])
def test_a_page_that_is_no_header_is_refused(page: bytes) -> None:
    with pytest.raises(DamagedFile):
        decode_checkpoint_header(page)


def test_the_two_kinds_of_header_are_not_taken_for_each_other() -> None:
    segment = SegmentHeader.encode(_segment_header())
    for decode, page in ((decode_header, HEADER.encode()), (decode_checkpoint_header, segment)):
        with pytest.raises(DamagedFile) as refused:
            decode(page)
        assert refused.value.field == "magic"


def _segment_header() -> SegmentHeader:
    from tests.store.samples import plans

    planned = plans(WITH_CHECKPOINTS, WITH_CHECKPOINTS.segments[0])[0]
    return planned.with_digests([bytes([1]) * 16 for _ in planned.blocks])


# ------------------------------------------------------------------------------------------------------------ manifests


@given(
    n_tokens=st.integers(1, 900),
    frontier=st.none() | st.integers(1, 900),
    rows=st.booleans(),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_a_manifest_comes_back_as_it_was(n_tokens, frontier, rows, data) -> None:
    positions = data.draw(st.sets(st.integers(1, n_tokens), min_size=0 if rows else 1, max_size=9))
    sizes = st.integers(1, MAX_CHECKPOINT_BYTES)
    options = {} if rows else {"stages": ()}
    manifest = conversation(
        1,
        n_tokens,
        frontier=frontier if frontier is not None and frontier <= n_tokens else None,
        checkpoints=[(position, data.draw(sizes)) for position in sorted(positions)],
        **options,
    )
    assert decode_manifest(encode_manifest(manifest)) == manifest
    expected = tuple(prefix.checkpoint_key(ROOT, manifest.token_ids, position) for position in sorted(positions))
    assert manifest.checkpoint_keys == expected
    assert list(manifest.objects) == [*manifest.keys, *expected]
    assert set(manifest.keys).isdisjoint(expected)
    n_segments = data.draw(st.integers(1, len(manifest.keys)))
    part = manifest.first(n_segments)
    assert [c.position for c in part.checkpoints] == [p for p in sorted(positions) if p <= part.n_tokens]
    assert part.checkpoint_keys == expected[: len(part.checkpoints)]
    if rows or part.checkpoints:
        assert decode_manifest(encode_manifest(part)) == part


def test_without_stages_the_segments_have_keys_and_no_bytes() -> None:
    assert ROWLESS.file_bytes == (0, 0)
    assert ROWLESS.keys == conversation(2, 300).keys
    assert ROWLESS.objects == {**dict.fromkeys(ROWLESS.keys, 0), ROWLESS.checkpoint_keys[0]: 4 * PAGE}


def test_checkpoints_can_be_left_out() -> None:
    left = WITH_CHECKPOINTS.without_checkpoints({512, 700, 9})
    assert [entry.position for entry in left.checkpoints] == [100, 600]
    assert WITH_CHECKPOINTS.without_checkpoints(()) is WITH_CHECKPOINTS


def with_body(fields: dict[str, object], version: int = 2) -> bytes:
    body = msgspec.msgpack.encode(fields)
    return HEAD.pack(b"strata-m", version, len(body), digest(body)) + body


def body_of(manifest: Manifest) -> dict[str, object]:
    return dict(msgspec.msgpack.decode(encode_manifest(manifest)[HEAD.size :]))


def packed(*entries: tuple[int, int]) -> bytes:
    return np.array(list(entries), ENTRY).tobytes()


def test_a_manifest_of_version_1_has_no_checkpoints() -> None:
    old = body_of(conversation(1, 300))
    del old["checkpoints"]
    assert decode_manifest(with_body(old, version=1)) == conversation(1, 300)
    for body, version, field in ((old, 2, "checkpoints"), (body_of(WITH_CHECKPOINTS), 1, "checkpoints")):
        with pytest.raises(DamagedFile) as refused:
            decode_manifest(with_body(body, version))
        assert refused.value.field == field


def test_version_1_must_have_stages() -> None:
    old = body_of(conversation(1, 300))
    del old["checkpoints"]
    with pytest.raises(DamagedFile) as refused:
        decode_manifest(with_body({**old, "stages": []}, version=1))
    assert refused.value.field == "stages"


@pytest.mark.parametrize(
    "checkpoints",
    [
        b"123",
        packed((0, 10)),
        packed((701, 10)),
        packed((5, 0)),
        packed((5, MAX_CHECKPOINT_BYTES + 1)),
        packed((5, 1 << 63)),
        packed((6, 10), (5, 10)),
        packed((5, 10), (5, 10)),
        packed(*((i + 1, 1) for i in range(MAX_CHECKPOINTS + 1))),
        b"\0" * (1 << 22),
    ],
    ids=lambda value: f"{len(value)} bytes",
)
def test_damaged_checkpoints_under_a_right_checksum_are_named(checkpoints: bytes) -> None:
    body = body_of(WITH_CHECKPOINTS)
    assert decode_manifest(with_body(body)) == WITH_CHECKPOINTS
    encoded = with_body({**body, "checkpoints": checkpoints})
    tracemalloc.start()
    try:
        with pytest.raises(DamagedFile) as refused:
            decode_manifest(encoded)
        assert tracemalloc.get_traced_memory()[1] < (1 << 20) + 3 * len(checkpoints)
    finally:
        tracemalloc.stop()
    assert refused.value.field == "checkpoints"


@pytest.mark.parametrize(
    ("field", "value"),
    [("checkpoints", b""), ("block_tokens", 100), ("file_bytes", np.array([1, 1], "<u8").tobytes())],
)
def test_a_rowless_manifest_is_checked_too(field: str, value: object) -> None:
    body = body_of(ROWLESS)
    with pytest.raises(DamagedFile) as refused:
        decode_manifest(with_body({**body, field: value}))
    assert refused.value.field == ("stages" if field == "checkpoints" else field)


def test_what_could_not_be_read_back_is_not_encoded() -> None:
    for entries in ((CheckpointEntry(701, 5),), (CheckpointEntry(5, 1), CheckpointEntry(4, 1))):
        with pytest.raises(DamagedFile) as refused:
            encode_manifest(msgspec.structs.replace(WITH_CHECKPOINTS, checkpoints=entries))
        assert refused.value.field == "checkpoints"


def test_every_single_bit_flip_of_a_manifest_is_detected() -> None:
    data = encode_manifest(conversation(1, 20, checkpoints=((5, 100), (20, 7))))
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedFile):
            decode_manifest(bytes(damaged))
