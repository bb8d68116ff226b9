"""The slots API of the real server and the real model: bytes, restarts, every status, and what memory it takes."""

from __future__ import annotations

import asyncio
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil
import pytest
from tests.serve.running import RunningServer, refusal
from tests.serve.test_bytes import FACTS, state, turn, workshop
from tests.serve.test_sessions import rewrite_payload

from strata.cache.admission import Floors
from strata.cache.sessions import SESSION_ARENA_BYTES, SessionMover, SessionState
from strata.engine.fake import FakeEngine
from strata.engine.fake_model import LAYERS
from strata.engine.protocol import Done
from strata.errors import SessionRefused
from strata.rules import prefix
from strata.serve.sessions import Sessions
from strata.store.arena import Arena
from strata.store.session import SessionFolder
from strata.store.spans import LARGE_PAGE
from strata.types import MIB, SEGMENT_TOKENS, Span, StageShape

NAME = "talk.bin"
LONG = " ".join(f"Drawer {i} of the cabinet holds {i * 7 % 97} brass keys." for i in range(45))
FIRST = [{"role": "user", "content": f"Remember this. {LONG}"}]
PLACED = "--flash-attention=off"
"""With it on, where the cells lie changes the last bits of a logit (ENGINE.md §0): greedy replies could differ."""


# --------------------------------------------------------------------------------------------------------------- bytes


def test_a_restored_slot_holds_the_same_bytes_and_says_the_same(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with workshop(tmp_path / "level") as (shop, arena):
            mover = SessionMover(
                engine=shop.engine,
                arena=arena,
                folder=SessionFolder.open(tmp_path / "sessions"),
                floors=Floors(parking_bytes=0, transient_bytes=0),
                memory=lambda: 1 << 40,
            )
            sessions = Sessions(shop, mover)
            at = await turn(shop, FACTS, 32)
            tokens = shop.slots.all[at].tokens
            other = await turn(shop, "A conversation that lives here. " * 12, 16)
            others = shop.slots.all[other].tokens
            mine, beside = await state(shop, arena, at, tokens), await state(shop, arena, other, others)
            await sessions.save(at, NAME, "")
            assert await sessions.erase(at, "") == len(tokens)
            target = next(i for i in range(3) if i not in (at, other))
            for slot in (at, target):
                assert (await sessions.restore(slot, NAME, "")).n_tokens == len(tokens)
                assert await state(shop, arena, slot, tokens) == mine
                assert await state(shop, arena, other, others) == beside
            await sessions.erase(target, "")

            # A payload replaced under right checksums: only this slot takes harm, and the next request is right again.
            file = mover.folder.open_file("", NAME, most_tokens=1024)
            rewrite_payload(tmp_path / "sessions" / NAME, file, 1)
            try:
                await sessions.restore(target, NAME, "")
            except SessionRefused as error:
                assert error.field == "payload"
            assert await state(shop, arena, other, others) == beside
            assert await state(shop, arena, at, tokens) == mine
            shop.slots.all[target].owed = False
            await sessions.erase(target, "")

    asyncio.run(scenario())


# ---------------------------------------------------------------------------------------------------------- the server


def act(server: RunningServer, slot: int, action: str, name: str = NAME, **more: Any) -> httpx.Response:
    body = None if action == "erase" else {"filename": name}
    return server.http.post(f"/slots/{slot}?action={action}", json=body, **more)


def ask(server: RunningServer, messages: list[dict[str, str]], max_tokens: int = 16, key: str | None = None) -> Any:
    client = server.client if key is None else server.client_with(key)
    return client.chat.completions.create(
        model="demo", messages=messages, max_tokens=max_tokens, temperature=0, extra_body={"ignore_eos": True}
    )


def cached(answer: Any) -> int:
    n = answer.usage.prompt_tokens_details.cached_tokens
    assert isinstance(n, int)
    return n


def next_turn(answer: Any) -> list[dict[str, str]]:
    text = answer.choices[0].message.content
    return [*FIRST, {"role": "assistant", "content": text}, {"role": "user", "content": "Which holds most?"}]


def status_of(response: httpx.Response, status: int, field: str | None = None) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert field is None or error["param"] == field
    return str(error["message"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any, str, int]]:
    """Sessions saved by a first server that keeps nothing else: folder, first answer, the next one, tokens saved."""
    root = tmp_path_factory.mktemp("saved")
    folder = root / "sessions"
    with RunningServer(root / "log", f"--slot-save-path={folder}", "--session-min-free-mib=1", PLACED) as server:
        first = ask(server, FIRST)
        saved = act(server, 0, "save").json()
        assert saved.keys() == {"id_slot", "filename", "n_saved", "n_written", "timings"}
        assert saved["timings"]["save_ms"] > 0
        path = folder / NAME
        assert saved["n_written"] == path.stat().st_size
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert act(server, 0, "erase").json() == {"id_slot": 0, "n_erased": saved["n_saved"]}
        restored = act(server, 0, "restore").json()
        assert restored.keys() == {"id_slot", "filename", "n_restored", "n_read", "timings"}
        assert restored["n_restored"] == saved["n_saved"] and restored["n_read"] == saved["n_written"]
        (slot,) = server.http.get("/slots").json()
        assert (slot["id"], slot["n_past"], slot["is_processing"]) == (0, saved["n_saved"], False)
        raw = server.client.chat.completions.with_raw_response.create(
            model="demo", messages=next_turn(first), max_tokens=32, temperature=0, extra_body={"ignore_eos": True}
        )
        assert raw.headers["x-strata-cache"].startswith(f"source=session; reused={saved['n_saved']}/")
        second = raw.parse().choices[0].message.content
        assert second is not None
        assert [p.name for p in folder.iterdir()] == [NAME]
        server.stop()
    yield folder, first, second, saved["n_saved"]


def test_the_same_continuation_after_a_restart_in_another_slot(
    tmp_path: Path, saved: tuple[Path, Any, str, int]
) -> None:
    folder, first, second, n_saved = saved
    flags = (f"--slot-save-path={folder}", "--parallel=2", "--context=4096", PLACED)
    with RunningServer(tmp_path / "log", *flags, cold=tmp_path / "cold") as server:
        assert act(server, 1, "restore").json()["n_restored"] == n_saved
        answer = ask(server, next_turn(first), 32)
        assert cached(answer) == n_saved
        assert answer.choices[0].message.content == second
        level = server.settled()  # and it is parked like any other
        assert level["conversations"] == 1
        counts = server.status()["sessions"]
        assert (counts["restored"], counts["restored_tokens"], counts["refused"]) == (1, n_saved, 0)


def test_every_status_of_the_real_server(tmp_path: Path, saved: tuple[Path, Any, str, int]) -> None:
    folder = tmp_path / "sessions"
    folder.mkdir()
    good = (saved[0] / NAME).read_bytes()
    (folder / NAME).write_bytes(good)
    (folder / "cut.bin").write_bytes(good[:-5000])
    (folder / "flipped.bin").write_bytes(good[:90_000] + b"!" + good[90_001:])
    (folder / "link.bin").symlink_to(saved[0] / NAME)
    with RunningServer(tmp_path / "log", PLACED, f"--slot-save-path={folder}", "--session-min-free-mib=1") as server:
        short = ask(server, [{"role": "user", "content": "A short talk."}])
        held = server.http.get("/slots").json()[0]["n_past"]
        status_of(act(server, 0, "restore", "none.bin"), 404, "filename")
        status_of(act(server, 5, "save"), 404, "id_slot")
        status_of(act(server, 0, "save", "../x"), 400, "filename")
        assert "size" in status_of(act(server, 0, "restore", "cut.bin"), 400, "filename")
        assert "digest" in status_of(act(server, 0, "restore", "flipped.bin"), 400, "filename")
        assert "regular file" in status_of(act(server, 0, "restore", "link.bin"), 400, "filename")
        status_of(act(server, 0, "save", "link.bin"), 400, "filename")
        assert status_of(server.http.post("/slots/0?action=save", content=b"{}"), 415)
        status_of(act(server, 0, "erase", headers={"origin": "http://evil.example"}), 403, "Origin")
        status_of(server.http.get("/slots", headers={"host": "evil.example"}), 403, "Host")
        assert server.http.get("/slots").json()[0]["n_past"] == held
        again = ask(server, [{"role": "user", "content": "A short talk."}])
        assert cached(again) == again.usage.prompt_tokens - 1
        assert again.choices[0].message.content == short.choices[0].message.content
        assert (saved[0] / NAME).read_bytes() == good
        assert sorted(p.name for p in folder.iterdir()) == ["cut.bin", "flipped.bin", "link.bin", NAME]
        # Save while the slot is generating: it waits, and the reply is whole.
        answers: list[Any] = []
        talk = threading.Thread(target=lambda: answers.append(ask(server, FIRST, 100)))
        talk.start()
        while not server.http.get("/slots").json()[0]["is_processing"]:
            pass
        n_saved = act(server, 0, "save", "busy.bin").json()["n_saved"]
        talk.join()
        assert answers[0].usage.completion_tokens == 100
        assert n_saved == answers[0].usage.prompt_tokens + 99


def test_statuses_of_a_full_disk_no_memory_and_no_path(tmp_path: Path) -> None:
    path = f"--slot-save-path={tmp_path / 'sessions'}"
    with RunningServer(tmp_path / "a", path, "--session-min-free-mib=1000000000") as server:
        ask(server, [{"role": "user", "content": "Hi."}])
        assert "free some space" in status_of(act(server, 0, "save"), 507)
    floors = ("--conversation-cache-min-free-mib=9000000", "--conversation-cache-park-min-free-mib=9000000")
    with RunningServer(tmp_path / "b", path, "--session-min-free-mib=1", *floors) as server:
        ask(server, [{"role": "user", "content": "Hi."}])
        response = act(server, 0, "save")
        status_of(response, 503)
        assert response.headers["retry-after"]
    with RunningServer(tmp_path / "c") as server:
        for action in ("save", "restore", "erase"):
            assert "--slot-save-path" in status_of(act(server, 0, action), 501)
        assert server.http.get("/slots").json()[0]["is_processing"] is False
        assert server.status()["sessions"] is None
    assert list((tmp_path / "sessions").iterdir()) == []


def test_keys_do_not_share_sessions(tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    flags = (f"--slot-save-path={folder}", "--session-min-free-mib=1", "--parallel=2")
    with RunningServer(tmp_path / "log", PLACED, *flags, keys=("one", "two")) as server:
        ask(server, FIRST, key="one")
        one, two = ({"x-api-key": key} for key in ("one", "two"))
        at = next(s["id"] for s in server.http.get("/slots", headers=one).json() if s["n_past"])
        assert "n_past" not in server.http.get("/slots", headers=two).json()[at]
        status_of(act(server, at, "save"), 401)
        status_of(act(server, at, "save", headers=two), 403, "id_slot")
        status_of(act(server, at, "erase", headers=two), 403, "id_slot")
        assert act(server, at, "save", headers=one).status_code == 200
        status_of(act(server, 1 - at, "restore", headers=two), 404, "filename")
        assert act(server, 1 - at, "restore", headers=one).status_code == 200
        assert server.http.get("/slots", headers={**one, "host": "strata.lan"}).status_code == 200


def test_a_folder_of_a_level_is_refused(tmp_path: Path) -> None:
    cold = tmp_path / "cold"
    code, said = refusal(f"--conversation-cache-cold-dir={cold}", f"--slot-save-path={cold}/x")
    assert code == 2 and "--slot-save-path" in said
    (tmp_path / "file").write_text("x")
    code, said = refusal(f"--slot-save-path={tmp_path / 'file'}")
    assert code == 1 and "not a directory" in said


# -------------------------------------------------------------------------------------------------------------- memory


class BigEngine(FakeEngine):
    """60 KB of state per token, made of nothing and compared when it comes back."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena, slots=2, context=8192)
        shape = StageShape(layer_first=0, layer_end=LAYERS, base_bytes=0, token_bytes=60_000)
        self.info = msgspec.structs.replace(self.info, stages=(shape,))
        self.held = [0, 0]
        self.most_used = 0

    def _payload(self, span: Span, n: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        self.most_used = max(self.most_used, self._arena.used_bytes)
        head = self.info.head_room
        return np.frombuffer(self._arena.view(span)[head : head + 60_000 * n], np.uint8)

    async def capture(self, slot: int, start: int, end: int, spans: tuple[Span, ...]) -> Done:
        self._payload(spans[0], end - start)[:] = start // SEGMENT_TOKENS % 251
        return Done(job=0, ok=True, held=self.held[slot])

    async def apply(  # type: ignore[override]
        self, slot: int, *, start: int, end: int, upto: int, spans: tuple[Span, ...], **_: object
    ) -> Done:
        payload = self._payload(spans[0], end - start)
        ok = (
            int(payload.min()) == int(payload.max()) == start // SEGMENT_TOKENS % 251
        )  # without memory for a comparison
        self.held[slot] = upto
        return Done(job=0, ok=ok, held=upto)


def test_a_session_of_300_mb_takes_two_blocks_of_memory(tmp_path: Path) -> None:
    n_tokens, block_bytes = 5100, 256 * 60_000
    arena = Arena(SESSION_ARENA_BYTES, LARGE_PAGE, pretouch=False)
    tokens = np.arange(n_tokens, dtype=np.int32) % 200
    process, most, done = psutil.Process(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, process.memory_info().rss)

    async def scenario() -> None:
        nonlocal most
        engine = BigEngine(arena)
        engine.held[0] = n_tokens
        mover = SessionMover(
            engine=engine,
            arena=arena,
            folder=SessionFolder.open(tmp_path),
            floors=Floors(parking_bytes=0, transient_bytes=0),
            memory=lambda: 1 << 40,
        )
        root = prefix.root_key(engine.info.fingerprint, "")
        talk = SessionState(slot=0, root=root, tokens=tokens, frontier=5000, conversation=b"c" * 32)
        before = most = process.memory_info().rss
        watching = threading.Thread(target=watch)
        watching.start()
        try:
            assert await mover.save(talk, owner="", name=NAME) > 300_000_000
            file = await mover.check(owner="", name=NAME, namespace="")
            assert await mover.apply(file, 1) == n_tokens
        finally:
            done.set()
            watching.join()
        assert engine.most_used <= 2 * (block_bytes + engine.info.head_room + 4096)
        assert arena.used_bytes == 0
        assert arena.reserved_bytes <= 36 * MIB
        print(f"{(most - before) / MIB:.1f} MiB more than before")
        assert most - before <= 40 * MIB, f"{(most - before) / MIB:.1f} MiB more than before"

    asyncio.run(scenario())
    arena.close()
