"""Free ranges and chunk sizes of the arena: pure arithmetic.

Covers first-fit allocation with coalescing inside one chunk, and how large a new chunk should be. It owns no memory.
"""

from __future__ import annotations

from bisect import bisect_left

from strata.types import MIB

LARGE_PAGE = 2 * MIB


def plan_chunk(length: int, chunk_bytes: int, room_bytes: int) -> int | None:
    """Size of a new chunk that holds `length` bytes, or None when `room_bytes` (what the limit leaves) is too small.

    Normally `chunk_bytes`; larger for a larger request, rounded up to large pages if there is room for that.
    """
    if length > room_bytes:
        return None
    if length <= chunk_bytes:
        return min(chunk_bytes, room_bytes)
    return min(-(-length // LARGE_PAGE) * LARGE_PAGE, room_bytes)


class FreeList:
    """Free ranges of [0, size), ascending, never adjacent to each other."""

    def __init__(self, size: int) -> None:
        self._starts = [0]
        self._lengths = [size]

    def __repr__(self) -> str:
        return f"FreeList({list(zip(self._starts, self._lengths, strict=True))})"

    def take(self, length: int, below: int) -> int | None:
        """The first offset with `length` free bytes that end at or before `below`; None when there is none."""
        for i, (start, free) in enumerate(zip(self._starts, self._lengths, strict=True)):
            if start + length > below:
                return None
            if free >= length:
                if free == length:
                    del self._starts[i], self._lengths[i]
                else:
                    self._starts[i], self._lengths[i] = start + length, free - length
                return start
        return None

    def give(self, start: int, length: int) -> None:
        """Return a range that `take` handed out; it melts into free neighbours."""
        i = bisect_left(self._starts, start)
        if i < len(self._starts) and start + length == self._starts[i]:
            length += self._lengths[i]
            del self._starts[i], self._lengths[i]
        if i > 0 and self._starts[i - 1] + self._lengths[i - 1] == start:
            self._lengths[i - 1] += length
        else:
            self._starts.insert(i, start)
            self._lengths.insert(i, length)
