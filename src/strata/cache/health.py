"""Whether the disk of a level takes writes at this moment: its writer lives, did not just fail, and has space.

It looks at the writer alone, and touches no file.
"""

from __future__ import annotations

import time

from strata.store.writer import OK, Writer
from strata.types import KIB, MIB

RETRY_S = 5.0
"""After a failure a disk is left alone for so long, unless nothing else can keep a state."""
MARGIN_BYTES = 256 * KIB
"""Space that a volume must have beside the files of a write: for manifests and folders."""


class Health:
    """Of one level. `failed_at`: when a write failed that none has followed since, on the monotonic clock."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.failed_at: float | None = None
        self._short_bytes = 0  # that the volume lacked for the last write that was not tried

    def __repr__(self) -> str:
        return f"Health({self.state}, {self._writer.free_bytes} bytes free)"

    @property
    def usable(self) -> bool:
        """Whether writing may succeed: the writer lives, and did not fail a moment ago."""
        resting = self.failed_at is not None and time.monotonic() - self.failed_at < RETRY_S
        return self._writer.is_alive and not resting

    @property
    def state(self) -> str:
        """ "ok", or what is wrong, for people."""
        return f"failing: {self._no_space()}" if self._short_bytes else self._writer.state

    def note(self) -> None:
        """A write ended: remember whether the disk fails, so that others go elsewhere for a moment."""
        self.failed_at = None if self._writer.state == OK else time.monotonic()
        self._short_bytes = 0

    def lacking_bytes(self, n_bytes: int) -> int:
        """By how much the volume is too small for `n_bytes` more; 0 when it is not."""
        return max(0, n_bytes + MARGIN_BYTES - self._writer.free_bytes)

    def no_space_for(self, n_bytes: int) -> str:
        """Why `n_bytes` need not be tried; empty when they may fit. `state` says it until the next write."""
        self._short_bytes = self.lacking_bytes(n_bytes)
        return self._no_space() if self._short_bytes else ""

    def _no_space(self) -> str:
        return f"No space left on its volume: {self._short_bytes / MIB:.1f} MiB are lacking"
