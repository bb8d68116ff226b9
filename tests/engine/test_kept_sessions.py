"""Real llama.cpp on memory that cannot be cut: a session goes to another process and slot, and what follows is right.

The twin never left its slot and read the same tokens in the same batches. A session that is saved again after its
restore must be the same file: that compares the rows and the checkpoint, byte for byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from tests.engine.rig import GREEDY
from tests.engine.test_kept_turns import FIRST, SECOND, engine, settings
from tests.serve.running import RunningServer
from tests.serve.test_sessions import rewrite_payload

from strata.cache.admission import Floors
from strata.cache.sessions import SessionMover
from strata.engine.protocol import EngineSettings
from strata.errors import SessionRefused
from strata.serve.request import Completed, Text, TurnRequest
from strata.serve.sessions import Sessions
from strata.serve.slots import Slots
from strata.serve.turn import Workshop, run_turn
from strata.store.session import SessionFolder

NAME, AGAIN, BESIDE = "talk.bin", "again.bin", "beside.bin"
OTHER = ({"role": "user", "content": "A conversation that lives here. " * 12},)
every_model = pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen35", {}),
        ("qwen35", {"layer_split": (1, 1)}),
        ("lfm2", {}),
        ("lfm2_window", {}),
        ("mamba", {}),
        ("gemma3", {}),
        ("gemma3", {"swa_full": False}),
        ("deepseek32", {}),
    ],
)


def two_slots(path: Path, options: dict[str, object]) -> EngineSettings:
    return msgspec.structs.replace(settings(path, **options), slots=2)


@asynccontextmanager
async def life(wanted: EngineSettings, folder: Path) -> AsyncIterator[tuple[Workshop, Sessions]]:
    """A new process that keeps nothing but sessions."""
    async with engine(wanted) as (client, arena):
        assert not client.info.cuttable, client.info.mode_reason
        slots = Slots(wanted.slots)
        slots.resume_point = lambda root, tokens: 0
        shop = Workshop(engine=client, slots=slots, cache=None)
        mover = SessionMover(
            engine=client,
            arena=arena,
            folder=SessionFolder.open(folder),
            floors=Floors(parking_bytes=0, transient_bytes=0),
            memory=lambda: 1 << 40,
        )
        yield shop, Sessions(shop, mover)
        assert arena.used_bytes == 0


async def say(shop: Workshop, messages: tuple[dict[str, str], ...], max_tokens: int) -> tuple[str, Completed, int]:
    """The reply, what is said of it, and the slot that it was written in."""
    before = [slot.tokens for slot in shop.slots.all]
    request = TurnRequest(messages=messages, sampling=GREEDY, max_tokens=max_tokens, ignore_eos=True)
    text, last = "", None
    async with aclosing(run_turn(shop, request)) as events:
        async for event in events:
            text += event.text if isinstance(event, Text) else ""
            last = event
    assert isinstance(last, Completed)
    (at,) = [slot.index for slot in shop.slots.all if slot.tokens is not before[slot.index]]
    return text, last, at


@every_model
def test_a_session_goes_on_in_another_process_and_slot(
    name: str, options: dict[str, object], tiny_paths: dict[str, Path], tmp_path: Path
) -> None:
    wanted = two_slots(tiny_paths[name], options)

    async def body() -> None:
        async with life(wanted, tmp_path) as (shop, sessions):
            _, first, at = await say(shop, FIRST, 1)  # what the slot holds then is the prompt
            saved = await sessions.save(at, NAME, "")
            assert saved.n_tokens == first.prompt_tokens
            expected, second, _ = await say(shop, SECOND, 64)
            assert (second.cache.source, second.cached_tokens) == ("live", first.prompt_tokens)
        async with life(wanted, tmp_path) as (shop, sessions):
            target = 1 - at
            restored = await sessions.restore(target, NAME, "")
            assert restored.n_tokens == saved.n_tokens
            await sessions.save(target, AGAIN, "")
            assert (tmp_path / AGAIN).read_bytes() == (tmp_path / NAME).read_bytes()
            text, second, found = await say(shop, SECOND, 64)
            assert (second.cache.source, second.cached_tokens, found) == ("session", saved.n_tokens, target)
            assert text == expected

    asyncio.run(body())


@every_model
def test_a_forged_checkpoint_harms_no_other_slot(
    name: str, options: dict[str, object], tiny_paths: dict[str, Path], tmp_path: Path
) -> None:
    wanted = two_slots(tiny_paths[name], options)

    async def body() -> None:
        async with life(wanted, tmp_path) as (shop, sessions):
            right, _, at = await say(shop, OTHER, 16)  # in an empty pool, as in the end
            await sessions.erase(at, "")
            _, _, at = await say(shop, FIRST, 1)
            await sessions.save(at, NAME, "")
            file = SessionFolder.open(tmp_path).open_file("", NAME, most_tokens=2048)
            _, _, beside = await say(shop, OTHER, 16)
            assert beside != at
            await sessions.save(beside, BESIDE, "")
            before = (tmp_path / BESIDE).read_bytes()
            for index in range(file.plan.n_blocks):
                good = (tmp_path / NAME).read_bytes()
                rewrite_payload(tmp_path / NAME, file, index)
                try:
                    await sessions.restore(at, NAME, "")
                except SessionRefused as error:
                    assert error.field == "payload"
                    assert len(shop.slots.all[at].tokens) == 0
                (tmp_path / NAME).write_bytes(good)
                await sessions.save(beside, BESIDE, "")
                assert (tmp_path / BESIDE).read_bytes() == before
                await sessions.erase(at, "")
            # And it still answers rightly, in the slot that was given nonsense.
            await sessions.erase(beside, "")
            assert (await say(shop, OTHER, 16))[0] == right

    asyncio.run(body())


def test_the_server_saves_and_restores_a_hybrid(tiny_paths: dict[str, Path], tmp_path: Path) -> None:
    flags = (f"--model={tiny_paths['qwen35']}", f"--slot-save-path={tmp_path / 'sessions'}", "--session-min-free-mib=1")

    def act(server: RunningServer, slot: int, action: str) -> dict[str, int]:
        answer = server.http.post(f"/slots/{slot}?action={action}", json={"filename": NAME})
        assert answer.status_code == 200, answer.text
        done: dict[str, int] = answer.json()
        return done

    def ask(server: RunningServer, messages: tuple[dict[str, str], ...], max_tokens: int) -> tuple[int, str | None]:
        answer = server.client.chat.completions.create(
            model="any",
            messages=list(messages),  # type: ignore[arg-type]
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0, answer.choices[0].message.content

    with RunningServer(tmp_path / "log", *flags, "--threads=1", "--parallel=2") as server:
        ask(server, FIRST, 1)
        at = next(slot["id"] for slot in server.http.get("/slots").json() if slot["n_past"])
        saved = act(server, at, "save")["n_saved"]
        cached, expected = ask(server, SECOND, 32)
        assert cached == saved
        assert act(server, at, "erase")["n_erased"] > saved
        server.stop()
    with RunningServer(tmp_path / "log", *flags, "--threads=1", "--parallel=2") as server:
        assert act(server, 1 - at, "restore")["n_restored"] == saved
        assert ask(server, SECOND, 32) == (saved, expected)
        server.stop()
