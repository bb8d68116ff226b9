"""What became of a writer's jobs: one value for each outcome, and its statistics."""

from __future__ import annotations

from dataclasses import dataclass

from strata.store.reader import NotRead
from strata.types import Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A segment or checkpoint file is written, under a temporary name."""

    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """A file of another level is here too, under a temporary name; `linked`: it is the same file."""

    bytes: int
    linked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The conversation is durable. `manifest_bytes`: what the manifest takes on disk."""

    manifest_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """The files are gone; `bytes` were freed."""

    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """The file is set aside, or was not there any more (`found` False)."""

    found: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned:
    """The ticket's temporary files are removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Nothing was acknowledged. `errno` is set when the operating system refused.

    After a failed commit, files of the ticket may be complete on disk all the same: drop those of `left` that no
    manifest names. `giver` is set when the level to adopt from could not give its file; this level is fine then.
    `vanished`: files of this level were removed by someone else; its account says which are left.
    """

    reason: str
    errno: int | None = None
    left: tuple[Key, ...] = ()
    giver: NotRead | None = None
    vanished: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterStatistics:
    """Monotonic, except for the two `waiting_`."""

    bytes_written: int
    files_written: int
    fsyncs: int
    failures: int
    seconds: float  # spent working
    hash_wait_s: float  # of these, waiting for a digest
    waiting_jobs: int
    waiting_bytes: int
