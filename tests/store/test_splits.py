"""Manifests whose segments lie in several splits of the layers: round trips, refusals, and what a scan says of them."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store import samples
from tests.store.samples import IDENTITY, STAGES, conversation

from strata.errors import DamagedFile
from strata.store.account import Vanished
from strata.store.format import Manifest, decode_manifest, digest, encode_manifest, plan_segment, segment_file_bytes
from strata.store.level import Level
from strata.store.manifest import MAX_SPLITS
from strata.store.names import MAX_STAGES, segment_path
from strata.store.session_format import plan_session
from strata.types import StageShape

HEAD = struct.Struct("<8sQQ16s")
ONE = (StageShape(layer_first=0, layer_end=3, base_bytes=24, token_bytes=152),)
THREE = tuple(StageShape(layer_first=i, layer_end=i + 1, base_bytes=8, token_bytes=51) for i in range(3))
PLAIN = conversation(1, 700, frontier=600)
MIXED = PLAIN.with_splits([ONE, THREE, STAGES, THREE])


def version_of(data: bytes) -> int:
    return int(HEAD.unpack_from(data)[1])


def body_of(manifest: Manifest) -> dict[str, object]:
    return dict(msgspec.msgpack.decode(encode_manifest(manifest)[HEAD.size :]))


def with_body(fields: dict[str, object], version: int = 3) -> bytes:
    body = msgspec.msgpack.encode(fields)
    return HEAD.pack(b"strata-m", version, len(body), digest(body)) + body


# ----------------------------------------------------------------------------------------------------------- manifests


@given(data=st.data(), n_tokens=st.integers(1, 1500))
@settings(max_examples=60, deadline=None)
def test_each_segment_comes_back_in_its_split(data: st.DataObject, n_tokens: int) -> None:
    plain = conversation(1, n_tokens)
    splits = data.draw(
        st.lists(st.sampled_from((ONE, STAGES, THREE)), min_size=len(plain.keys), max_size=len(plain.keys))
    )
    manifest = plain.with_splits(splits)
    assert [manifest.stages_of(i) for i in range(len(splits))] == splits
    again = decode_manifest(encode_manifest(manifest))
    assert again == manifest
    sizes = [
        sum(segment_file_bytes(shape, s.start, s.end, again.block_tokens) for shape in stages)
        for s, stages in zip(again.segments, splits, strict=True)
    ]
    assert list(again.file_bytes) == sizes
    n = data.draw(st.integers(1, len(splits)))
    part = decode_manifest(encode_manifest(manifest.first(n)))
    assert [part.stages_of(i) for i in range(n)] == splits[:n]
    assert again.with_splits([STAGES] * len(splits)) == plain


def test_a_manifest_of_one_split_is_as_older_versions_know_it() -> None:
    assert version_of(encode_manifest(PLAIN)) == 2
    assert version_of(encode_manifest(MIXED)) == 3
    assert PLAIN.with_splits([STAGES] * 4) is PLAIN
    for version in (1, 2):
        with pytest.raises(DamagedFile):
            decode_manifest(with_body(body_of(MIXED), version))
    with pytest.raises(DamagedFile):
        decode_manifest(with_body(body_of(PLAIN), 3))


SHAPE = msgspec.to_builtins(ONE[0])


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("other_splits", [], "splits"),
        ("other_splits", [[]], "other_splits"),
        ("other_splits", [[SHAPE]], "splits"),
        ("other_splits", [[SHAPE]] * (MAX_SPLITS + 1), "other_splits"),
        ("other_splits", [[SHAPE, SHAPE], [SHAPE]], "other_splits"),
        ("other_splits", [[{**SHAPE, "token_bytes": 0}], [SHAPE]], "other_splits"),
        ("other_splits", [[SHAPE] * (MAX_STAGES + 1), [SHAPE]], "other_splits"),
        ("splits", b"", "splits"),
        ("splits", b"\0\0\0", "splits"),
        ("splits", bytes(5), "splits"),
        ("splits", b"\0\0\0\3", "splits"),
        ("splits", bytes(4), "file_bytes"),
        ("splits", b"\0" * (1 << 22), "splits"),
        ("file_bytes", np.array(PLAIN.file_bytes, "<u8").tobytes(), "file_bytes"),
        ("stages", [], "other_splits"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_damage_under_a_right_checksum_is_named(field: str, value: object, named: str) -> None:
    assert decode_manifest(with_body(body_of(MIXED))) == MIXED
    changed = {**body_of(MIXED), field: value}
    if field == "stages":
        changed["checkpoints"] = np.array([(5, 9)], [("position", "<u4"), ("n_bytes", "<u8")]).tobytes()
    encoded = with_body(changed)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedFile) as refused:
            decode_manifest(encoded)
        assert tracemalloc.get_traced_memory()[1] < (1 << 20) + 40 * len(encoded)
    finally:
        tracemalloc.stop()
    assert refused.value.field == named


def test_a_session_has_one_split() -> None:
    with pytest.raises(DamagedFile) as refused:
        plan_session(MIXED, manifest_bytes=1000, kv="f16")
    assert refused.value.field == "other_splits"


# ---------------------------------------------------------------------------------------------------------- directories


def store(level: Level, manifest: Manifest) -> None:
    headers = [
        plan_segment(segment, stage=i, n_stages=len(stages), shape=shape, block_tokens=manifest.block_tokens)
        for n, segment in enumerate(manifest.segments)
        for stages in [manifest.stages_of(n)]
        for i, shape in enumerate(stages)
    ]
    level.publish([level.write_segment(header, samples.payloads(header)) for header in headers])
    level.put_manifest(manifest)


@pytest.fixture
def level(tmp_path: Path) -> Level:
    level = Level.open(tmp_path)
    store(level, MIXED)
    return level


def test_a_scan_knows_the_split_of_every_segment(level: Level) -> None:
    scan = level.scan(IDENTITY)
    assert [stored.manifest for stored in scan.manifests] == [MIXED] and scan.stale == scan.orphans == ()
    assert [scan.splits[key] for key in MIXED.keys] == [ONE, THREE, STAGES, THREE]
    assert [level.stages_of(key) for key in MIXED.keys] == [[0], [0, 1, 2], [0, 1], [0, 1, 2]]
    assert level.used_bytes == level.usage()
    level.require(MIXED)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_segment_that_lacks_a_stage_is_not_whole(level: Level, stage: int) -> None:
    (level.root / segment_path(MIXED.keys[3], stage)).unlink()
    with pytest.raises(Vanished):
        level.require(MIXED)
    (stale,) = level.scan(IDENTITY).stale
    assert stale.reason == "segment 3 of 4 has the wrong size or number of stages"


def test_a_segment_with_a_stage_too_many_is_not_whole(level: Level) -> None:
    path = level.root / segment_path(MIXED.keys[2], 2)
    path.write_bytes((level.root / segment_path(MIXED.keys[2], 1)).read_bytes())
    (stale,) = level.scan(IDENTITY).stale
    assert stale.reason.startswith("segment 2 of 4")


def test_an_older_manifest_is_whole_when_a_newer_one_says_how_its_segment_is_split_now(level: Level) -> None:
    level.drop((), [MIXED.keys[1]])
    newer = conversation(2, 700, frontier=600).with_splits([ONE, ONE, STAGES, STAGES])
    store(level, newer)
    scan = level.scan(IDENTITY)
    assert scan.stale != (), "the last segment has one stage too many now"
    level.drop((), [MIXED.keys[3]])
    store(level, newer)
    scan = level.scan(IDENTITY)
    assert scan.stale == () and [stored.manifest.serial for stored in scan.manifests] == [1, 2]
    assert scan.splits[MIXED.keys[1]] == ONE and scan.splits[MIXED.keys[3]] == STAGES
