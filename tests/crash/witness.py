"""`strata`, with a witness: the same program, which also notes in a file what its cache acknowledges and lets go.

Run as `python -m tests.crash.witness serve ...` with WITNESS_JOURNAL naming the file. Each note is one line of JSON,
written at once with one system call, so that it outlives a SIGKILL. The witness changes nothing: a note is written
after an acknowledgement became known, and before the files of what is dropped are touched. After every restore it
captures what the engine holds once more and compares it with the digests of what was stored.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from strata.cache.cache import ConversationCache
from strata.cache.capturing import block_lengths
from strata.cache.disk import DiskLevel, _conversation
from strata.cache.ram import RamLevel
from strata.cache.restoring import Restored, Restoring
from strata.cache.state import Conversation, HeldSegment, Match
from strata.cli.main import main
from strata.rules import prefix
from strata.store.format import Manifest, digest
from strata.store.level import Level
from strata.store.writer import Writer
from strata.types import SEGMENT_TOKENS

JOURNAL = os.open(os.environ["WITNESS_JOURNAL"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def note(what: str, **facts: Any) -> None:
    os.write(JOURNAL, json.dumps({"what": what, **facts}).encode() + b"\n")


def facts(entry: Conversation) -> dict[str, Any]:
    """`fixed`: how many of its first keys any later state of the same conversation has too."""
    return {
        "serial": entry.serial,
        "conversation": entry.conversation.hex(),
        "tokens": len(entry.tokens),
        "stamp": entry.stamp_s,
        "keys": [key.hex() for key in entry.keys],
        "fixed": (entry.frontier or len(entry.tokens)) // SEGMENT_TOKENS,
    }


def around(cls: type, name: str, wrap: Callable[..., Callable[..., Any]]) -> None:
    setattr(cls, name, wrap(getattr(cls, name)))


def disk_opened(original: Callable[..., None]) -> Callable[..., None]:
    """What a level holds from the start."""

    def init(self: DiskLevel, level: Level, *args: Any) -> None:
        original(self, level, *args)
        for entry in self.index.conversations():
            note("opened", level=self.name, **facts(entry))

    return init


def recorded(original: Callable[..., None]) -> Callable[..., None]:
    """Durable: it goes into the index, and what it supersedes goes, without a wait in between."""

    def record(self: DiskLevel, manifest: Manifest, *args: Any, **kwargs: Any) -> None:
        note("acknowledged", level=self.name, **facts(_conversation(manifest, 0)))
        original(self, manifest, *args, **kwargs)

    return record


def before_drop(original: Callable[..., Any]) -> Callable[..., Any]:
    def drop(self: Writer, serials: Any, keys: Any) -> Any:
        for serial in serials:
            note("drop", level=self._level.name, serial=serial)
        return original(self, serials, keys)

    return drop


def before_commit(original: Callable[..., Any]) -> Callable[..., Any]:
    def commit(self: Writer, ticket: int, manifest: Any) -> Any:
        note("commit", level=self._level.name, serial=manifest.serial)
        return original(self, ticket, manifest)

    return commit


def checked(original: Callable[..., Any]) -> Callable[..., Any]:
    """Whoever asks for the state has the indexes checked too."""

    def status(self: ConversationCache) -> Any:
        if wrong := self.check():
            note("check", wrong=wrong)
        return original(self)

    return status


def quarantining(original: Callable[..., bool]) -> Callable[..., bool]:
    def quarantine(self: Level, *args: Any) -> bool:
        note("quarantine", level=self.name, which=repr(args))
        return original(self, *args)

    return quarantine


def ram_kept(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_conversation(self: RamLevel, *args: Any, **kwargs: Any) -> Any:
        entry, old = original(self, *args, **kwargs)
        note("ram", **facts(entry))
        return entry, old

    return add_conversation


def captured_again(original: Callable[..., Any]) -> Callable[..., Any]:
    """Whole segments that a restore brought in, captured once more: the digests must be those that were stored."""

    async def run(self: Restoring, match: Match, keep: int) -> Restored:
        restored: Restored = await original(self, match, keep)
        right = wrong = 0
        for held in match.path:
            if held.segment.start < keep or held.segment.end > restored.held:
                continue
            expected = await stored_digests(self, held)
            found = await engine_digests(self, held)
            right, wrong = right + (found == expected), wrong + (found != expected)
        failed = restored.bad.reason if restored.bad is not None else ""
        note("restored", ram=restored.ram_bytes, all=restored.n_bytes, right=right, wrong=wrong, failed=failed)
        return restored

    return run


async def stored_digests(restoring: Restoring, held: HeldSegment) -> list[list[bytes]]:
    """[block][stage], of the copy that the restore took."""
    ram, reader = restoring._ram, restoring._reader
    if ram is not None and ram.index.holds(held.key):
        return [list(row) for row in await ram.digests(held.key)]
    assert reader is not None
    stages = range(len(restoring._engine.info.stages))
    headers = [await asyncio.wrap_future(reader.header(held.key, stage)) for stage in stages]
    return [list(row) for row in zip(*([b.digest for b in h.blocks] for h in headers), strict=True)]  # type: ignore[union-attr]


async def engine_digests(restoring: Restoring, held: HeldSegment) -> list[list[bytes]]:
    engine, pool = restoring._engine, restoring._blocks
    found = []
    for start, end in prefix.blocks(held.segment.start, held.segment.end, engine.info.block_tokens):
        spans = await pool.take(block_lengths(engine, end - start))
        assert spans is not None, "no memory to look at what was restored"
        done = await engine.capture(restoring._slot, start, end, spans)
        assert done.ok, done.reason
        sizes = [stage.payload_bytes(end - start) for stage in engine.info.stages]
        found.append([digest(pool.place(span)[:n]) for span, n in zip(spans, sizes, strict=True)])
        pool.give_back(spans)
    return found


if __name__ == "__main__":
    around(DiskLevel, "__init__", disk_opened)
    around(DiskLevel, "_record", recorded)
    around(Writer, "drop", before_drop)
    around(Writer, "commit", before_commit)
    around(Level, "quarantine_segment", quarantining)
    around(Level, "quarantine_manifest", quarantining)
    around(ConversationCache, "status", checked)
    around(RamLevel, "add_conversation", ram_kept)
    around(Restoring, "run", captured_again)
    sys.exit(main())
