"""A file whose blocks come one by one, for a payload that is never in memory all at once.

It lies under a temporary name like any file that is not published yet. Its header names the digests of all blocks, so
the header's page is written again when the last one is there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from strata.store.content import PendingFile, header_page, padded_payload
from strata.store.filesystem import Filesystem
from strata.store.format import FileHeader


class GrowingFile:
    """Belongs to the thread that writes to its level."""

    def __init__(
        self,
        fs: Filesystem,
        root: Path,
        header: FileHeader,
        final: str,
        temporary: str,
        grew: Callable[[str, int], None],
    ) -> None:
        """`header`: planned, its page written already. `grew` is told of the path and every number of bytes written."""
        self.pending = PendingFile(temporary=temporary, final=final, size=header.file_bytes)
        self._fs = fs
        self._root = root
        self._header = header
        self._grew = grew
        self._digests: list[bytes] = []

    def __repr__(self) -> str:
        return f"GrowingFile({self._header!r}, {len(self._digests)} blocks are there)"

    @property
    def is_whole(self) -> bool:
        """Whether it may be published."""
        return len(self._digests) == len(self._header.blocks)

    def add(self, index: int, payload: memoryview, digest: bytes) -> None:
        """Write block `index`, which must be the next one; a payload as in `Level.write_segment`."""
        if index != len(self._digests) or self.is_whole:
            raise ValueError(f"block {index} does not follow block {len(self._digests) - 1}")
        block = self._header.blocks[index]
        at = block.offset
        for view in padded_payload(payload, block.length):
            at += self._write(at, view)
        self._digests.append(digest)
        if self.is_whole:
            self._write(0, header_page(self._header.with_digests(self._digests)))

    def _write(self, offset: int, view: memoryview) -> int:
        self._fs.write_at(self._root / self.pending.temporary, offset, view)
        self._grew(self.pending.temporary, len(view))
        return len(view)
