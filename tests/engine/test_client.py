"""Processes that die, cannot start, or start with other settings; each test has processes of its own."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.engine.rig import Rig

from strata.engine import client as client_module
from strata.engine.client import EngineClient
from strata.engine.environment import environment
from strata.engine.protocol import EngineSettings
from strata.errors import ConfigError, EngineGone, ModelError


@pytest.fixture
def tiny_settings(tiny_paths: dict[str, Path]) -> EngineSettings:
    return EngineSettings(model_path=str(tiny_paths["qwen2vl"]), slots=2, context=512, flash_attention="on", threads=1)


@pytest.fixture
def tiny_rig(runner: asyncio.Runner, tiny_settings: EngineSettings) -> Iterator[Rig]:
    rig = Rig(tiny_settings, runner, arena_mib=128)
    rig.start()
    yield rig
    rig.close()


def refusal(runner: asyncio.Runner, settings: EngineSettings) -> Exception:
    """What a start with `settings` ends with."""

    async def attempt() -> None:
        client = EngineClient(settings, None)
        try:
            await client.start()
        finally:
            await client.close()

    with pytest.raises((ModelError, ConfigError)) as caught:
        runner.run(attempt())
    return caught.value


# --------------------------------------------------------------------------------------------------------------- deaths


def test_calls_in_flight_fail_clearly_and_the_next_process_works(tiny_rig: Rig) -> None:
    rig = tiny_rig
    tokens = (np.arange(400) * 7 % 2000).astype(np.int32)

    async def scene() -> list[BaseException | None]:
        running = rig.run(tokens, max_tokens=100, ignore_eos=True)
        await anext(aiter(running))
        waiting = [
            asyncio.ensure_future(anext(aiter(running))),
            asyncio.ensure_future(rig.client.prepare(text="x" * 3_000_000)),
        ]
        await asyncio.sleep(0)
        assert rig.client.pid is not None
        os.kill(rig.client.pid, signal.SIGKILL)
        with pytest.raises(EngineGone):
            while True:
                await anext(aiter(running))
        with pytest.raises(EngineGone):
            await running.cancel()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        return [result for result in results if isinstance(result, BaseException)]

    began = time.perf_counter()
    errors = rig.do(scene())
    for error in errors:
        assert isinstance(error, EngineGone) and error.status == 503 and error.retry_after_s
        assert "signal 9" in str(error) and "send the request again" in str(error)
    assert any(errors)
    rig.do(rig.client.wait_ready())
    assert time.perf_counter() - began < 20
    assert rig.client.generation == 2 and len(rig.restarts) == 1
    assert rig.generate(tokens, max_tokens=1).finished.held == 400


def test_calls_between_two_processes_are_refused_at_once(tiny_rig: Rig) -> None:
    rig = tiny_rig
    rig.kill()
    assert rig.client.state == "restarting" and rig.client.pid is None
    with pytest.raises(EngineGone):
        rig.run([1, 2, 3])
    with pytest.raises(EngineGone):
        rig.do(rig.client.trim(0, 0))
    assert rig.do(rig.client.wait_ready()) == rig.info


def test_chunks_made_before_during_and_after_a_restart(tiny_rig: Rig) -> None:
    """Every arena chunk is attached to every process."""
    rig = tiny_rig
    tokens = (np.arange(200) * 7 % 2000).astype(np.int32)
    rig.generate(tokens, max_tokens=0)
    block = rig.capture(0, 0, 200)
    want = rig.payload(block)
    rig.kill()
    filler = rig.arena.alloc(64 << 20)  # a second chunk while the new process is loading
    assert filler is not None and filler.chunk == 1
    rig.do(rig.client.wait_ready())
    rig.restore(0, [block], tokens)
    again = rig.capture(0, 0, 200)
    assert rig.payload(again) == want
    assert {span.chunk for span in (*block.spans, filler)} == {0, 1}
    rig.arena.free(filler)
    assert rig.do(rig.client.capture(0, 0, 200, (filler,))).ok


def test_too_many_failures_stop_the_restarts(
    runner: asyncio.Runner, tiny_paths: dict[str, Path], tmp_path: Path
) -> None:
    model = tmp_path / "model.gguf"
    shutil.copy(tiny_paths["qwen2vl"], model)
    settings = EngineSettings(model_path=str(model), slots=1, context=512, flash_attention="on")
    rig = Rig(settings, runner, arena_mib=0)
    rig.start()
    model.unlink()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client_module, "_FIRST_BACKOFF_S", 0.01)
            rig.kill()
            with pytest.raises(EngineGone) as caught:
                rig.do(rig.client.wait_ready())
        assert rig.client.state == "failed" and rig.client.pid is None
        assert "5 times within 60 s" in str(caught.value) and "does not exist" in str(caught.value)
        with pytest.raises(EngineGone, match="does not exist"):
            rig.do(rig.client.detokenize(np.zeros(1, np.int32)))
    finally:
        rig.close()


def test_another_model_under_the_same_name_is_not_taken(
    runner: asyncio.Runner, tiny_paths: dict[str, Path], tmp_path: Path
) -> None:
    """Parked state of the old model must never reach the new one."""
    model = tmp_path / "model.gguf"
    shutil.copy(tiny_paths["qwen2vl"], model)
    settings = EngineSettings(model_path=str(model), slots=1, context=512, flash_attention="on")
    rig = Rig(settings, runner, arena_mib=0)
    rig.start()
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.unlink()
    model.write_bytes(data)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client_module, "_FIRST_BACKOFF_S", 0.01)
            rig.kill()
            with pytest.raises(EngineGone, match="has changed; restart the server"):
                rig.do(rig.client.wait_ready())
    finally:
        rig.close()


def test_a_closed_client_refuses(runner: asyncio.Runner, tiny_settings: EngineSettings) -> None:
    rig = Rig(tiny_settings, runner, arena_mib=0)
    rig.start()
    pid = rig.client.pid
    rig.close()
    assert pid is not None and not Path(f"/proc/{pid}").exists()
    assert rig.client.state == "closed"
    with pytest.raises(EngineGone, match="shutting down"):
        rig.run([1])
    rig.close()  # twice is fine


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_engine_ends_with_its_front(tiny_settings: EngineSettings) -> None:
    """kill -9 of the front: no engine process stays behind."""
    code = (
        "import asyncio, sys, msgspec\n"
        "from strata.engine.client import EngineClient\n"
        "from strata.engine.protocol import EngineSettings\n"
        "async def main():\n"
        "    client = EngineClient(msgspec.json.decode(sys.argv[1], type=EngineSettings), None)\n"
        "    await client.start()\n"
        "    print(client.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    arguments = [sys.executable, "-c", code, msgspec.json.encode(tiny_settings).decode()]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        engine = int(front.stdout.readline())
        front.kill()
    descriptor = os.pidfd_open(engine) if Path(f"/proc/{engine}").exists() else None
    if descriptor is not None:
        assert select.select([descriptor], [], [], 10)[0], "the engine is still running"
        os.close(descriptor)


# ----------------------------------------------------------------------------------------------------------- bad starts


def test_model_files_that_cannot_be_served(runner: asyncio.Runner, tiny_paths: dict[str, Path], tmp_path: Path) -> None:
    good = tiny_paths["qwen2vl"].read_bytes()
    header_damaged = bytearray(good)
    header_damaged[8:16] = b"\xff" * 8  # the number of tensors
    files = {
        "missing": (None, "does not exist"),
        "empty": (b"", "is empty"),
        "text": (b"hello, this is not a model", "is not a GGUF file"),
        "header only": (good[:100], "damaged or cut off"),
        "half": (good[: len(good) // 2], "is truncated"),
        "one byte short": (good[:-33], "is truncated"),
        "bad header": (bytes(header_damaged), "damaged or cut off"),
    }
    for name, (data, words) in files.items():
        path = tmp_path / f"{name}.gguf"
        if data is not None:
            path.write_bytes(data)
        error = refusal(runner, EngineSettings(model_path=str(path), slots=1))
        assert isinstance(error, ModelError) and error.field == "--model"
        assert words in str(error) and path.name in str(error), (name, str(error))
    error = refusal(runner, EngineSettings(model_path=str(tmp_path), slots=1))
    assert "is a directory" in str(error)


def test_a_model_llama_cpp_refuses_says_why(
    runner: asyncio.Runner, tiny_paths: dict[str, Path], tmp_path: Path
) -> None:
    data = tiny_paths["qwen2vl"].read_bytes().replace(b"qwen2vl", b"qwenXvl")
    path = tmp_path / "unknown.gguf"
    path.write_bytes(data)
    error = refusal(runner, EngineSettings(model_path=str(path), slots=1))
    assert isinstance(error, ModelError)
    assert "unknown model architecture: 'qwenXvl'" in str(error) and "choose another with --model" in str(error)


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"slots": 0}, "--parallel", "1..254"),
        ({"slots": 300}, "--parallel", "1..254"),
        ({"context": 0}, "--context", "at least 1"),
        ({"kv_k": "q3_x"}, "--kv", "one of f32, f16"),
        ({"flash_attention": "maybe"}, "--flash-attention", "auto, on or off"),
        ({"flash_attention": "off", "kv_v": "q8_0"}, "--flash-attention", "needs flash attention"),
        ({"layer_split": (1,) * 6}, "--layer-split", "6 parts, more than the model's 5 layers"),
        ({"layer_split": (1,) * 17}, "--layer-split", "at most 16 numbers"),
        ({"layer_split": (0, 0)}, "--layer-split", "not all of them 0"),
        ({"layer_split": (1, -1)}, "--layer-split", "numbers from 0"),
        ({"turn_token": "huh"}, "--turn-token", "token id below 2048"),
        ({"turn_token": "2048"}, "--turn-token", "token id below 2048"),
    ],
    ids=lambda value: str(value),
)
def test_settings_that_cannot_be_served(
    runner: asyncio.Runner, tiny_settings: EngineSettings, change: dict[str, object], field: str, words: str
) -> None:
    error = refusal(runner, msgspec.structs.replace(tiny_settings, **change))
    assert isinstance(error, ConfigError) and error.field == field and words in str(error)


# ------------------------------------------------------------------------------------------------------- other settings


@pytest.mark.parametrize(
    "change",
    [
        {"flash_attention": "off"},
        {"kv_k": "q8_0", "kv_v": "q8_0"},
        {"layer_split": (1, 2)},
        {"layer_split": (1, 1, 2), "flash_attention": "off", "kv_k": "q8_0"},
    ],
    ids=lambda change: ",".join(f"{k}={v}" for k, v in change.items()),
)
def test_bytes_survive_the_process_in_every_configuration(
    runner: asyncio.Runner, smollm2_settings: EngineSettings, change: dict[str, object]
) -> None:
    rig = Rig(msgspec.structs.replace(smollm2_settings, slots=2, **change), runner, arena_mib=64)
    rig.start()
    try:
        assert rig.info.mode == "segments", rig.info.mode_reason
        assert len(rig.info.stages) == len(change.get("layer_split", (1,)))
        tokens = (np.arange(150) * 37 % 40000).astype(np.int32)
        rig.generate(tokens, max_tokens=0)
        blocks = [rig.capture(0, 0, 100), rig.capture(0, 100, 150)]
        want = rig.payloads(blocks)
        twin = rig.generate(tokens, keep=149, max_tokens=8, ignore_eos=True).tokens
        rig.kill()
        rig.do(rig.client.wait_ready())
        rig.restore(0, blocks, tokens)
        assert rig.payloads([rig.capture(0, 0, 100), rig.capture(0, 100, 150)]) == want
        assert rig.generate(tokens, keep=149, max_tokens=8, ignore_eos=True).tokens == twin
    finally:
        rig.close()


@pytest.mark.parametrize("name", ["gemma3", "qwen35", "lfm2_window", "mamba"])
def test_memory_that_cannot_be_cut_survives_the_process(
    runner: asyncio.Runner, tiny_paths: dict[str, Path], name: str
) -> None:
    """Checkpoints on the way and at the end; then a new process goes on at each of them."""
    settings = EngineSettings(
        model_path=str(tiny_paths[name]), slots=2, context=512, flash_attention="off", read_chunk=64
    )
    rig = Rig(settings, runner, arena_mib=64)
    rig.start()
    try:
        tokens = (np.arange(150) * 7 % 2000).astype(np.int32)
        reply = rig.generate(tokens, max_tokens=6, ignore_eos=True, checkpoints=(70, 128, 149), hold_end=True)
        assert [event.held for event in reply.progress] == [64, 70, 128, 149, 150]
        assert [event.position for event in reply.held] == [70, 128, 149, 155] and all(h.checkpoint for h in reply.held)
        every = np.concatenate([tokens, np.array(reply.tokens, np.int32)])
        blocks = [rig.capture(0, 0, 155)] if rig.info.stages else []
        parked = {
            held.position: (rig.capture_checkpoint(held.checkpoint, held.payload_bytes), held.payload_bytes)
            for held in reply.held
        }
        rig.kill()
        rig.do(rig.client.wait_ready())
        for position in (155, 149, 128, 70):
            spans, total = parked[position]
            rig.do(rig.client.trim(0, 0))
            rig.restore(0, blocks, every)
            done = rig.apply_checkpoint(0, position, total, spans)
            assert done.ok and done.held == position, done
            again = rig.do(rig.client.hold(0))
            assert rig.bytes_of(rig.capture_checkpoint(again.checkpoint, again.payload_bytes)) == rig.bytes_of(spans)
        spans, total = parked[149]
        rig.do(rig.client.trim(1, 0))
        rig.restore(1, blocks, every)
        assert rig.apply_checkpoint(1, 149, total, spans).ok
        assert rig.generate(tokens, slot=1, keep=149, max_tokens=6, ignore_eos=True).tokens == reply.tokens
    finally:
        rig.close()


def test_memory_that_cannot_be_cut_says_so(runner: asyncio.Runner, tiny_paths: dict[str, Path]) -> None:
    """Hybrid memory: a prompt that extends what the slot holds is continued, any other read from 0."""
    settings = EngineSettings(model_path=str(tiny_paths["qwen35"]), slots=2, context=512, flash_attention="on")
    rig = Rig(settings, runner, arena_mib=1)
    rig.start()
    try:
        assert rig.info.mode == "checkpoints" and "hybrid" in rig.info.mode_reason and not rig.info.cuttable
        tokens = (np.arange(60) * 7 % 2000).astype(np.int32)
        first = rig.generate(tokens, max_tokens=6, ignore_eos=True)
        longer = np.concatenate([tokens, np.array([*first.tokens, 9, 8], np.int32)])
        more = rig.generate(longer, keep=first.finished.held, max_tokens=2, ignore_eos=True)
        assert more.finished.timing.read_tokens == 3
        refused = rig.do(rig.client.trim(0, 30))
        assert not refused.ok and refused.held == more.finished.held and "cannot be cut" in refused.reason
        assert rig.do(rig.client.trim(0, 0)).ok
        assert rig.generate(tokens, max_tokens=6, ignore_eos=True).tokens == first.tokens
        with pytest.raises(Exception, match="checkpoints"):
            rig.generate(tokens, checkpoints=(61,))
        assert rig.do(rig.client.release_checkpoint(7)).reason == "checkpoint 7 is not held"
        with pytest.raises(Exception, match="cannot be cut"):
            rig.generate(tokens, keep=10)
    finally:
        rig.close()


def test_openmp_defaults_yield_to_the_users_choice() -> None:
    assert environment({})["GOMP_SPINCOUNT"] == "500"
    assert environment({"GOMP_SPINCOUNT": "5"})["GOMP_SPINCOUNT"] == "5"
    assert "GOMP_SPINCOUNT" not in environment({"OMP_WAIT_POLICY": "active"})
    pages, copies = "glibc.malloc.hugetlb=1", "glibc.cpu.x86_rep_movsb_threshold=0x10000000"
    assert environment({})["GLIBC_TUNABLES"] == f"{pages}:{copies}"
    both = environment({"GLIBC_TUNABLES": "glibc.malloc.perturb=0"})["GLIBC_TUNABLES"]
    assert both == f"glibc.malloc.perturb=0:{pages}:{copies}"
    own = environment({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"})["GLIBC_TUNABLES"]
    assert own == f"glibc.malloc.hugetlb=0:{copies}"
    assert environment({"STRATA_NO_LARGEPAGES": "1"})["GLIBC_TUNABLES"] == copies
