"""What leaves a level's directory: told to the writer, counted as gone at once, and tried again when the disk refuses.

The index has forgotten it by then. Its bytes stay counted as gone while it cannot be removed: or the level, over its
budget without an end, would let go of one sound conversation after the other. Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from strata.store.level import Level
from strata.store.writer import Dropped, Failed, Writer
from strata.types import Key

log = logging.getLogger("strata.cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Removal:
    """Manifests by serial with the bytes of each, and segments and checkpoints by key."""

    manifests: Mapping[int, int]
    keys: Sequence[Key]
    n_bytes: int


class Removals:
    """Those of one level. `n_bytes`: what the account still has of them.

    The writer's thread takes them off the account before the event loop hears of it: until then they are gone twice.
    """

    def __init__(self, level: Level, writer: Writer, on_ended: Callable[[], None]) -> None:
        """`on_ended`: one has ended, and the level may take more than it seemed to."""
        self.n_bytes = 0
        self.files: set[str] = set()
        """Files that were set aside and are being removed."""
        self._level = level
        self._writer = writer
        self._on_ended = on_ended
        self._refused: list[_Removal] = []
        self._told = False

    def remove(self, manifests: Mapping[int, int], keys: Sequence[Key], key_bytes: int) -> None:
        """Remove manifests, then what only they named. `key_bytes`: what the keys take."""
        n_bytes = sum(manifests.values()) + key_bytes
        self._send(_Removal(manifests=manifests, keys=keys, n_bytes=n_bytes))

    def remove_files(self, sizes: Mapping[str, int]) -> None:
        """Remove files that were set aside."""
        self.files.update(sizes)
        n_bytes = sum(sizes.values())
        self.n_bytes += n_bytes
        self._watch(self._writer.remove_files(tuple(sizes)), partial(self._files_gone, tuple(sizes), n_bytes))

    def retry(self, is_wanted: Callable[[Key], bool]) -> None:
        """Try what the disk refused once more, but for segments that are `is_wanted` again meanwhile."""
        refused, self._refused = self._refused, []
        for removal in refused:
            self.n_bytes -= removal.n_bytes
            self._send(self._left(removal, is_wanted))

    def _send(self, removal: _Removal) -> None:
        self.n_bytes += removal.n_bytes
        if removal.manifests or removal.keys:
            self._watch(self._writer.drop(tuple(removal.manifests), removal.keys), partial(self._ended, removal))

    @staticmethod
    def _watch(job: Future[Dropped | Failed], ended: Callable[[asyncio.Future[Dropped | Failed]], None]) -> None:
        asyncio.wrap_future(job).add_done_callback(ended)

    def _ended(self, removal: _Removal, outcome: asyncio.Future[Dropped | Failed]) -> None:
        self.n_bytes -= removal.n_bytes
        if outcome.cancelled():
            return
        if not isinstance(found := outcome.result(), Failed):
            self._told = False
            self._on_ended()
            return
        left = self._left(removal, lambda _: False)
        self.n_bytes += left.n_bytes
        self._refused.append(left)
        if not self._told:
            log.warning("%s: files cannot be removed; this is tried again: %s", self._level.name, found.reason)
        self._told = True

    def _left(self, removal: _Removal, is_wanted: Callable[[Key], bool]) -> _Removal:
        """What of it is still there and may go."""
        manifests = {serial: n for serial, n in removal.manifests.items() if self._level.has(serial)}
        keys = [key for key in removal.keys if self._level.has(key) and not is_wanted(key)]
        n_bytes = sum(manifests.values()) + sum(self._level.segment_bytes(key) for key in keys)
        return _Removal(manifests=manifests, keys=keys, n_bytes=n_bytes)

    def _files_gone(self, paths: Sequence[str], n_bytes: int, _: object) -> None:
        self.n_bytes -= n_bytes
        self.files.difference_update(paths)
        self._on_ended()
