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
from collections.abc import Callable, Sequence
from typing import Any

from strata.cache.cache import ConversationCache
from strata.cache.capturing import block_lengths
from strata.cache.disk import DiskLevel
from strata.cache.entries import Conversation, HeldSegment
from strata.cache.ram import RamLevel
from strata.cache.restoring import Applied, Planned, Restoring
from strata.cli.main import main
from strata.errors import EngineGone
from strata.rules import prefix
from strata.store.format import Manifest, digest
from strata.store.level import Level
from strata.store.writer import Writer
from strata.types import SEGMENT_TOKENS

JOURNAL = os.open(os.environ["WITNESS_JOURNAL"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def note(what: str, **facts: Any) -> None:
    os.write(JOURNAL, json.dumps({"what": what, **facts}).encode() + b"\n")


def facts(entry: Conversation) -> dict[str, Any]:
    """`fixed`: how many of its first keys any later state of the same conversation has too. `born`: in which order."""
    return {
        "serial": entry.serial,
        "conversation": entry.conversation.hex(),
        "tokens": len(entry.tokens),
        "born": entry.born,
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

    def record(self: DiskLevel, manifest: Manifest, entry: Conversation, **kwargs: Any) -> None:
        note("acknowledged", level=self.name, **facts(entry))
        original(self, manifest, entry, **kwargs)

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

    async def run(self: Restoring, plan: Sequence[Planned], keep: int, upto: int) -> Applied:
        applied: Applied = await original(self, plan, keep, upto)
        right = wrong = 0
        failed = applied.bad.text() if applied.bad is not None else ""
        try:
            for planned in plan:
                if planned.held.segment.start >= keep and planned.held.segment.end <= applied.held:
                    same = await engine_digests(self, planned.held) == await stored_digests(self, planned)
                    right, wrong = right + same, wrong + (not same)
        except EngineGone:
            raise
        except Exception as error:  # whoever called this would take it for a failed rung
            failed = f"the witness could not look: {error!r}"
        note("restored", levels=applied.bytes_by_level, right=right, wrong=wrong, failed=failed)
        return applied

    return run


async def stored_digests(restoring: Restoring, planned: Planned) -> list[list[bytes]]:
    """[block][stage], of the copy that the restore took."""
    if planned.disk is None:
        assert restoring._ram is not None
        return [list(row) for row in await restoring._ram.digests(planned.held.key)]
    files = [(planned.held.key, stage) for stage in range(len(planned.held.stages))]
    headers = await asyncio.wrap_future(planned.disk.reader.headers(files))
    return [list(row) for row in zip(*([b.digest for b in h.blocks] for h in headers), strict=True)]  # type: ignore[union-attr]


async def engine_digests(restoring: Restoring, held: HeldSegment) -> list[list[bytes]]:
    engine, pool = restoring._engine, restoring._blocks
    found = []
    for start, end in prefix.blocks(held.segment.start, held.segment.end, engine.info.block_tokens):
        spans = await pool.take(block_lengths(engine, end - start, engine.info.stages))
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
