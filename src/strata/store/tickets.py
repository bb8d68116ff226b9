"""What one ticket of a writer has written so far and not published: the files of one park, or of a part of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from strata.store.content import PendingFile
from strata.store.format import CheckpointHeader
from strata.store.growing import GrowingFile
from strata.store.level import Level
from strata.store.outcomes import Failed, Written
from strata.types import Key


@dataclass(slots=True)
class Ticket:
    """Belongs to the writer's thread. Once one of its files failed it cannot be committed. `growing`: not whole yet."""

    files: list[PendingFile] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    growing: dict[Key, GrowingFile] = field(default_factory=dict)
    failed: Failed | None = None

    def grow(
        self, level: Level, header: CheckpointHeader, index: int, payload: memoryview, digest: bytes
    ) -> Written | Failed:
        """Write the next block of a file; the first one begins it."""
        if self.failed is not None:
            return self.failed
        if not index:
            self.growing[header.key] = level.begin_growing(header)
            self.files.append(self.growing[header.key].pending)
            self.keys.append(header.key)
        file = self.growing[header.key]
        file.add(index, payload, digest)
        if file.is_whole:
            del self.growing[header.key]
        return Written(bytes=header.blocks[index].length)

    def join(self, level: Level, other: Ticket) -> Written | Failed:
        """Have the files of another one. One that failed, or is not whole, costs its own files alone."""
        failed = self.failed or other.failed or (Failed(reason="a file of it is not whole") if other.growing else None)
        if failed is not None:
            level.discard(other.files)
            return failed
        self.files += other.files
        self.keys += other.keys
        return Written(bytes=sum(file.size for file in other.files))
