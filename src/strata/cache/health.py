"""Whether the disk of a level takes writes at this moment: its writer lives, does not fail, and has space.

After a failure it is tried with a small file, and with somebody's state only if nothing else can keep that.
"""

from __future__ import annotations

import asyncio

from strata.store.writer import OK, Failed, Writer
from strata.types import KIB, MIB

MARGIN_BYTES = 256 * KIB
"""Space that a volume must have beside the files of a write: for manifests and folders."""


class Health:
    """Of one level. `has_failed`: the last write did."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.has_failed = False
        self._wanted_bytes = 0  # of the last write that was not tried for want of space

    def __repr__(self) -> str:
        return f"Health({self.state}, {self._writer.free_bytes} bytes free)"

    @property
    def usable(self) -> bool:
        """Whether writing may succeed: the writer lives, and nothing failed since a write, or a probe, succeeded."""
        return self._writer.is_alive and not self.has_failed

    @property
    def state(self) -> str:
        """ "ok", or what is wrong, for people."""
        return f"failing: {self._no_space()}" if self._short_bytes else self._writer.state

    def note(self) -> None:
        """A write ended: remember whether the disk fails, so that others go elsewhere for a moment."""
        self.has_failed = self._writer.state != OK
        self._wanted_bytes = 0

    def probe(self) -> None:
        """See whether the disk works again, and how much space there is by now."""
        probed = asyncio.wrap_future(self._writer.probe())
        if self.has_failed:
            probed.add_done_callback(self._note_probe)

    def _note_probe(self, probed: asyncio.Future[Failed | None]) -> None:
        """It can only end what a write began: one that failed says nothing new."""
        if probed.result() is None:
            self.has_failed = False

    def lacking_bytes(self, n_bytes: int) -> int:
        """By how much the volume is too small for `n_bytes` more; 0 when it is not."""
        return max(0, n_bytes + MARGIN_BYTES - self._writer.free_bytes)

    def no_space_for(self, n_bytes: int) -> str:
        """Why `n_bytes` need not be tried; empty when they may fit. `state` says it as long as there is no space."""
        self._wanted_bytes = n_bytes
        return self._no_space() if self._short_bytes else ""

    @property
    def _short_bytes(self) -> int:
        return self.lacking_bytes(self._wanted_bytes) if self._wanted_bytes else 0

    def _no_space(self) -> str:
        return f"No space left on its volume: {self._short_bytes / MIB:.1f} MiB are lacking"
