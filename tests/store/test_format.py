"""Manifests, headers and names: round trips, and refusal of everything that is not exactly right."""

from __future__ import annotations

import struct
import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.samples import BLOCK_TOKENS, ROOT, STAGES, conversation

from strata.errors import DamagedFile
from strata.rules import prefix
from strata.store import names
from strata.store.format import (
    MAX_BLOCKS,
    MAX_STAGES,
    Manifest,
    SegmentHeader,
    decode_header,
    decode_manifest,
    digest,
    encode_header,
    encode_manifest,
    plan_segment,
    segment_file_bytes,
)
from strata.types import PAGE, Key, Segment, StageShape

HEAD = struct.Struct("<8sQQ16s")


def filled(header: SegmentHeader) -> SegmentHeader:
    return header.with_digests([bytes([i + 1]) * 16 for i in range(len(header.blocks))])


def sample_header(n_tokens: int = 256, stage: int = 1) -> SegmentHeader:
    segment = conversation(1, n_tokens).segments[0]
    return filled(plan_segment(segment, stage=stage, n_stages=2, shape=STAGES[stage], block_tokens=BLOCK_TOKENS))


@st.composite
def shapes(draw: st.DrawFn) -> tuple[StageShape, ...]:
    layer, result = draw(st.integers(0, 3)), []
    for _ in range(draw(st.integers(1, 4))):
        end = layer + draw(st.integers(1, 40))
        base, per_token = draw(st.integers(0, 5000)), draw(st.integers(1, 9000))
        result.append(StageShape(layer_first=layer, layer_end=end, base_bytes=base, token_bytes=per_token))
        layer = end
    return tuple(result)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    n_tokens = draw(st.integers(1, 900))
    sample = conversation(
        draw(st.integers(1, names.MAX_SERIAL)),
        n_tokens,
        seed=draw(st.integers(0, 1000)),
        frontier=draw(st.none() | st.integers(1, n_tokens)),
        stages=draw(shapes()),
        block_tokens=draw(st.integers(4, 300)),
        stamp_s=draw(st.floats(0, 1e12)),
    )
    return msgspec.structs.replace(sample, model_name=draw(st.text(max_size=40)))


# ------------------------------------------------------------------------------------------------------------ manifests


@given(manifests())
@settings(max_examples=60, deadline=None)
def test_a_manifest_comes_back_as_it_was(manifest: Manifest) -> None:
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_the_segments_of_a_manifest_are_the_chain_of_its_tokens() -> None:
    manifest = conversation(1, 700, frontier=600)
    assert manifest.segments == prefix.chain(ROOT, manifest.token_ids, manifest.cuts)


def test_every_single_bit_flip_of_a_manifest_is_detected() -> None:
    data = encode_manifest(conversation(1, 40))
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedFile):
            decode_manifest(bytes(damaged))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_manifest_cut_short_or_continued_is_refused(data: st.DataObject) -> None:
    encoded = encode_manifest(conversation(1, 40))
    keep = data.draw(st.integers(0, len(encoded) - 1))
    for damaged in (encoded[:keep], encoded + encoded[:keep] + b"\0"):
        with pytest.raises(DamagedFile) as refused:
            decode_manifest(damaged)
        assert refused.value.field == "length"


def with_body(fields: dict[str, object], version: int = 2) -> bytes:
    """An encoded manifest with these body fields and a right checksum."""
    body = msgspec.msgpack.encode(fields)
    return HEAD.pack(b"strata-m", version, len(body), digest(body)) + body


def body_of(manifest: Manifest) -> dict[str, object]:
    return dict(msgspec.msgpack.decode(encode_manifest(manifest)[HEAD.size :]))


STAGE = {"layer_first": 0, "layer_end": 2, "base_bytes": 24, "token_bytes": 52}
DAMAGE = [
    ("serial", 0),
    ("serial", -5),
    ("serial", 1 << 60),
    ("serial", "1"),
    ("identity", b"short"),
    ("root", bytes(31)),
    ("conversation", b""),
    ("tokens", b""),
    ("tokens", b"abc"),
    ("frontier", 0),
    ("frontier", 301),
    ("frontier", 1.5),
    ("cuts", np.array([300, 256], "<u4").tobytes()),
    ("cuts", np.array([256, 299], "<u4").tobytes()),
    ("cuts", b"abc"),
    ("cuts", b""),
    ("keys", bytes(64)),
    ("keys", b""),
    ("keys", bytes(33)),
    ("file_bytes", np.array([1, 2], "<u8").tobytes()),
    ("file_bytes", np.array([1 << 63, 1 << 63], "<u8").tobytes()),
    ("file_bytes", b"1234567"),
    ("stages", []),
    ("stages", [STAGE] * (MAX_STAGES + 1)),
    ("stages", [STAGE, STAGE]),
    ("stages", [{**STAGE, "layer_end": 0}]),
    ("stages", [{**STAGE, "token_bytes": 0}]),
    ("stages", [{**STAGE, "token_bytes": 1 << 62}]),
    ("stages", [{**STAGE, "base_bytes": -1}]),
    ("block_tokens", 0),
    ("block_tokens", 1 << 40),
    ("model_name", "x" * 5000),
    ("model_name", b"bytes"),
    ("created_s", float("nan")),
    ("created_s", -1.0),
    ("stamp_s", float("inf")),
]


@pytest.mark.parametrize(("field", "value"), DAMAGE, ids=lambda value: repr(value)[:30])
def test_a_damaged_field_under_a_right_checksum_is_named(field: str, value: object) -> None:
    body = body_of(conversation(1, 300))
    assert decode_manifest(with_body(body)) == conversation(1, 300)
    with pytest.raises(DamagedFile) as refused:
        decode_manifest(with_body({**body, field: value}))
    assert refused.value.field == field
    assert refused.value.message


@pytest.mark.parametrize("field", list(body_of(conversation(1))))
def test_a_missing_field_is_named(field: str) -> None:
    body = body_of(conversation(1))
    del body[field]
    with pytest.raises(DamagedFile) as refused:
        decode_manifest(with_body(body))
    assert refused.value.field == field


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(DamagedFile) as refused:
        decode_manifest(with_body({**body_of(conversation(1)), "extra": 1}))
    assert refused.value.field == "extra"


def test_changed_tokens_do_not_match_the_keys() -> None:
    body = body_of(conversation(1))
    tokens = bytearray(body["tokens"])
    tokens[-1] ^= 1
    with pytest.raises(DamagedFile) as refused:
        decode_manifest(with_body({**body, "tokens": bytes(tokens)}))
    assert refused.value.field == "keys"


@pytest.mark.parametrize(
    "body",
    [
        b"\xde\xff\xff",  # a map of 65,535 entries that are not there
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa6tokens\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
        b"\x81\xa6stages\xdd\xff\xff\xff\xff",  # four billion stages
        b"\x81\xa6serial\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x80\x04\x95pickle",
        b"",
    ],
)
def test_a_huge_length_in_the_body_allocates_nothing(body: bytes) -> None:
    encoded = HEAD.pack(b"strata-m", 2, len(body), digest(body)) + body
    assert_refused_without_allocating(encoded)


def test_a_huge_length_in_the_head_allocates_nothing() -> None:
    assert_refused_without_allocating(HEAD.pack(b"strata-m", 1, 1 << 62, bytes(16)) + b"body")


def assert_refused_without_allocating(encoded: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DamagedFile):
            decode_manifest(encoded)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_newer_version_is_told_from_damage() -> None:
    encoded = HEAD.pack(b"strata-m", 4, 3, bytes(16)) + b"xyz"
    with pytest.raises(DamagedFile, match="newer than this Strata") as refused:
        decode_manifest(encoded)
    assert refused.value.field == "version"


@pytest.mark.parametrize(("magic", "version", "field"), [(b"strata-s", 1, "magic"), (b"strata-m", 0, "version")])
def test_another_kind_of_file_is_refused(magic: bytes, version: int, field: str) -> None:
    with pytest.raises(DamagedFile) as refused:
        decode_manifest(HEAD.pack(magic, version, 0, digest(b"")))
    assert refused.value.field == field


def test_a_manifest_that_could_not_be_read_back_is_not_encoded() -> None:
    with pytest.raises(DamagedFile) as refused:
        encode_manifest(msgspec.structs.replace(conversation(1), frontier=301))
    assert refused.value.field == "frontier"


# ------------------------------------------------------------------------------------------------------ segment headers


@given(
    shapes(),
    st.integers(0, 100),
    st.integers(1, 256),
    st.integers(4, 300),
    st.binary(min_size=32, max_size=32),
)
@settings(max_examples=60, deadline=None)
def test_a_header_comes_back_as_it_was(stages, first, n_tokens, block_tokens, key) -> None:
    segment = Segment(key=Key(key), parent=ROOT, start=first * 256, end=first * 256 + n_tokens)
    for i, shape in enumerate(stages):
        planned = plan_segment(segment, stage=i, n_stages=len(stages), shape=shape, block_tokens=block_tokens)
        header = filled(planned)
        encoded = encode_header(header)
        assert len(encoded) == PAGE
        assert decode_header(encoded) == header
        assert header.same_geometry(planned)
        assert header.file_bytes == segment_file_bytes(shape, segment.start, segment.end, block_tokens)
        assert [(b.start, b.end) for b in header.blocks] == list(
            prefix.blocks(segment.start, segment.end, block_tokens)
        )


def test_every_single_bit_flip_of_a_header_is_detected() -> None:
    data = encode_header(sample_header())
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedFile):
            decode_header(damaged)


SECOND_BLOCK = 136 + 48
RAW_FIELDS = [  # offset in the page, width, field that is named, values
    (80, 4, "stage", (2, 1 << 31)),
    (84, 4, "n_stages", (0, MAX_STAGES + 1)),
    (88, 4, "shape", (3, 1 << 31)),
    (92, 4, "shape", (0, 1 << 31)),
    (96, 8, "shape", (1 << 31, 1 << 62)),
    (96, 8, "blocks.length", (1,)),
    (104, 8, "shape", (0, 1 << 62)),
    (104, 8, "blocks.length", (99,)),
    (112, 8, "start", (1 << 24, 1 << 62)),
    (112, 8, "blocks.start", (1,)),
    (120, 8, "end", (0, 257, 1 << 62)),
    (120, 8, "blocks", (255,)),
    (128, 8, "blocks", (0, 1 << 62)),
    (128, 8, "padding", (2,)),  # the rest of the table lies behind it
    (128, 8, "blocks.start", (4,)),
    (SECOND_BLOCK, 8, "blocks.start", (99, 101, 1 << 62)),
    (SECOND_BLOCK + 8, 8, "blocks.start", (0,)),
    (SECOND_BLOCK + 8, 8, "blocks.length", (99, 1 << 62)),
    (SECOND_BLOCK + 16, 8, "blocks.offset", (0, 1, PAGE, 1 << 62)),
    (SECOND_BLOCK + 24, 8, "blocks.length", (0, 1, 1 << 62)),
    (PAGE - 24, 8, "padding", (1,)),
]


@pytest.mark.parametrize(("offset", "width", "field", "values"), RAW_FIELDS)
def test_a_damaged_header_field_under_a_right_checksum_is_named(offset, width, field, values) -> None:
    for value in values:
        page = bytearray(encode_header(sample_header()))
        page[offset : offset + width] = value.to_bytes(width, "little")
        page[-16:] = digest(bytes(page[:-16]))
        with pytest.raises(DamagedFile) as refused:
            decode_header(page)
        assert refused.value.field == field


def test_each_header_check_names_its_field() -> None:
    header = sample_header()
    first, second, *rest = header.blocks
    change = msgspec.structs.replace
    cases = {
        "key": change(header, key=Key(b"short")),
        "parent": change(header, parent=Key(b"")),
        "n_stages": change(header, n_stages=MAX_STAGES + 1),
        "stage": change(header, stage=2),
        "shape": change(header, shape=change(header.shape, token_bytes=0)),
        "start": change(header, start=1 << 24),
        "end": change(header, end=257),
        "blocks": change(header, blocks=header.blocks[:-1]),
        "blocks.start": change(header, blocks=(first, change(second, start=99), *rest)),
        "blocks.offset": change(header, blocks=(first, change(second, offset=second.offset + PAGE), *rest)),
        "blocks.length": change(header, blocks=(first, change(second, length=second.length - 1), *rest)),
        "blocks.digest": change(header, blocks=(first, change(second, digest=b""), *rest)),
    }
    for field, damaged in cases.items():
        with pytest.raises(DamagedFile) as refused:
            encode_header(damaged)
        assert refused.value.field == field


@pytest.mark.parametrize("page", [b"", b"strata-s", bytes(PAGE), bytes(PAGE + 1)])
def test_a_page_that_is_no_header_is_refused(page: bytes) -> None:
    with pytest.raises(DamagedFile):
        decode_header(page)


def test_a_segment_has_at_most_64_blocks() -> None:
    segment = conversation(1, 256).segments[0]
    for block_tokens, fits in ((4, True), (3, False)):
        planned = plan_segment(segment, stage=0, n_stages=1, shape=STAGES[0], block_tokens=block_tokens)
        assert (len(planned.blocks) <= MAX_BLOCKS) is fits
        if not fits:
            with pytest.raises(DamagedFile) as refused:
                encode_header(planned)
            assert refused.value.field == "blocks"


def test_a_block_holds_at_most_16_mib() -> None:
    shape = StageShape(layer_first=0, layer_end=1, base_bytes=0, token_bytes=1 << 20)
    segment = conversation(1, 256).segments[0]
    planned = plan_segment(segment, stage=0, n_stages=1, shape=shape, block_tokens=17)
    with pytest.raises(DamagedFile) as refused:
        encode_header(planned)
    assert refused.value.field == "blocks.length"


# ---------------------------------------------------------------------------------------------------------------- names


@given(st.integers(1, names.MAX_SERIAL), st.binary(min_size=32, max_size=32), st.integers(0, MAX_STAGES - 1))
def test_names_come_back_as_they_were(serial: int, raw: bytes, stage: int) -> None:
    assert names.parse_manifest_name(names.manifest_name(serial)) == serial
    assert names.serial_in(names.manifest_name(serial) + ".7-1.tmp") == serial
    assert names.parse_segment_path(names.segment_path(Key(raw), stage)) == (raw, stage)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "strata-conv-1.meta",
        "strata-conv-00000000.meta",
        "strata-conv-000000001.meta",
        "strata-conv-00000001.meta.tmp",
        "strata-conv-00000001.meta\n",
        "strata-conv-٠٠٠٠٠٠٠١.meta",
        "../strata-conv-00000001.meta",
    ],
)
def test_only_exact_manifest_names_are_recognised(name: str) -> None:
    assert names.parse_manifest_name(name) is None


@pytest.mark.parametrize(
    "path",
    [
        "seg/aa/" + "ab" * 32 + ".s0.seg",
        "ab/" + "ab" * 32 + ".s0.seg",
        "seg/ab/" + "AB" * 32 + ".s0.seg",
        "seg/ab/" + "ab" * 32 + ".s00.seg",
        "seg/ab/" + "ab" * 32 + ".s64.seg",
        "seg/ab/" + "ab" * 32 + ".seg",
        "seg/ab/" + "ab" * 31 + ".s0.seg",
    ],
)
def test_only_exact_segment_paths_are_recognised(path: str) -> None:
    assert names.parse_segment_path(path) is None
