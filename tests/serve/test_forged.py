"""Damage that no checksum shows: every field of a header, and payloads, changed under a checksum that was made anew."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from tests.serve.test_ladder import FIRST, OTHER, cold, failed, file_at, first, key_at, stored, told, used
from tests.serve.workbench import Workbench, play

from strata.store.format import decode_header, digest, encode_header
from strata.store.names import segment_path
from strata.types import PAGE

__all__ = ["cold", "stored"]  # fixtures

_FIELDS_AT = 16  # behind magic and version
_BLOCKS_AT = _FIELDS_AT + 32 + 32 + 4 * 4 + 5 * 8
FIELDS = {
    "magic": (0, "B"),
    "version": (8, "Q"),
    "key": (_FIELDS_AT, "B"),
    "parent": (_FIELDS_AT + 32, "B"),
    "stage": (_FIELDS_AT + 64, "I"),
    "number of stages": (_FIELDS_AT + 68, "I"),
    "first layer": (_FIELDS_AT + 72, "I"),
    "last layer": (_FIELDS_AT + 76, "I"),
    "base bytes": (_FIELDS_AT + 80, "Q"),
    "token bytes": (_FIELDS_AT + 88, "Q"),
    "start": (_FIELDS_AT + 96, "Q"),
    "end": (_FIELDS_AT + 104, "Q"),
    "number of blocks": (_FIELDS_AT + 112, "Q"),
    "block start": (_BLOCKS_AT, "Q"),
    "block tokens": (_BLOCKS_AT + 8, "Q"),
    "block offset": (_BLOCKS_AT + 16, "Q"),
    "block length": (_BLOCKS_AT + 24, "Q"),
    "block digest": (_BLOCKS_AT + 32, "B"),
    "padding": (3000, "B"),
}
HUGE = {"B": 0xFF, "I": 0xFFFFFFFF, "Q": 0xFFFFFFFFFFFFFFFF}


def forge_header(path: Path, at: int, form: str, value: int | None) -> None:
    """Change one field (by one when no value is given) and make the header's checksum right again."""
    data = bytearray(path.read_bytes())
    (old,) = struct.unpack_from(f"<{form}", data, at)
    new = (old + 1) & HUGE[form] if value is None else value
    struct.pack_into(f"<{form}", data, at, new if new != old else new ^ 1)
    data[PAGE - 16 : PAGE] = digest(bytes(data[: PAGE - 16]))
    path.write_bytes(data)


def forge_payload(path: Path, seed: int = 0) -> None:
    """Random bytes instead of every block, under digests that hold."""
    data = bytearray(path.read_bytes())
    header = decode_header(bytes(data[:PAGE]))
    digests = []
    for block in header.blocks:
        payload = np.random.default_rng(seed).bytes(block.length)
        data[block.offset : block.offset + block.length] = payload
        digests.append(digest(payload))
    data[:PAGE] = encode_header(header.with_digests(digests))
    path.write_bytes(data)


@pytest.mark.parametrize("value", [None, 0, "huge"], ids=["one more", "zero", "huge"])
@pytest.mark.parametrize("field", FIELDS)
def test_a_forged_header_is_damage_and_disturbs_nobody(cold: Path, field: str, value: int | str | None) -> None:
    at, form = FIELDS[field]

    async def scenario(bench: Workbench) -> None:
        await bench.whole(OTHER)
        neighbour = next(slot for slot in bench.slots.all if len(slot.tokens))
        before = list(bench.engine.states[neighbour.index])
        forge_header(file_at(bench.disk, 256), at, form, HUGE[form] if value == "huge" else value)  # type: ignore[arg-type]
        answer = await bench.turn(FIRST)
        assert answer is not None and answer.completed.cached_tokens == 256
        assert bench.engine.states[neighbour.index] == before
        assert failed(bench) == {"whole": 1} and used(bench) == {"good_part": 1}
        await bench.check()
        assert bench.disk.counters.quarantined == 1 and told(bench, "quarantine")

    play(scenario, cold, slots=2)


@pytest.mark.parametrize("start", [0, 256, 512])
def test_a_forged_payload_reaches_its_own_slot_alone(cold: Path, start: int) -> None:
    """Nothing can tell it from a sound one (a person with write access to the folder can do that much)."""

    async def scenario(bench: Workbench) -> None:
        await bench.whole(OTHER)
        neighbour = next(slot for slot in bench.slots.all if len(slot.tokens))
        target = 1 - neighbour.index
        before = list(bench.engine.states[neighbour.index])
        path = file_at(bench.disk, start)
        sound = path.read_bytes()
        forge_payload(path)
        prompt = await bench.prompt_of(FIRST)
        found = bench.cache.lookup(first(bench.disk).root, prompt, beyond=1)
        assert found is not None
        restored = await bench.cache.restore(target, found, 0)
        assert restored.held == len(prompt) - 1
        assert bench.engine.states[neighbour.index] == before
        bench.engine.wrong_restores = 0  # as expected
        await bench.engine.trim(target, 0)
        path.write_bytes(sound)
        assert (await bench.whole(FIRST)).completed.cached_tokens == len(prompt) - 1
        assert bench.engine.states[neighbour.index][: len(before)] == before

    play(scenario, cold, slots=2)


@pytest.mark.parametrize("other", ["another position", "another conversation", "another stage"])
def test_a_file_in_the_place_of_another_one_is_damage(tmp_path: Path, other: str) -> None:
    async def scenario(bench: Workbench) -> None:
        await bench.whole(FIRST)
        await bench.whole(OTHER)
        victim = file_at(bench.disk, 256)
        last = max(bench.disk.index.conversations(), key=lambda c: c.serial)
        source = {
            "another position": file_at(bench.disk, 0),
            "another conversation": bench.disk.level.root / segment_path(last.keys[1], 0),
            "another stage": file_at(bench.disk, 256, 1),
        }[other]
        shutil.copy(source, victim)
        assert key_at(bench.disk, 256) != last.keys[1]
        answer = await bench.whole(FIRST)
        assert answer.completed.cached_tokens == 256
        assert bench.disk.counters.quarantined == 1

    play(scenario, tmp_path, slots=1, stages=2)
