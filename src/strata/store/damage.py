"""Damage found in a file, told with the file's name: decoders know only bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from strata.errors import DamagedFile


@contextmanager
def damage_in(path: Path) -> Iterator[None]:
    """Name the file in what its decoder says."""
    try:
        yield
    except DamagedFile as error:
        if str(path) in error.message:
            raise
        raise DamagedFile(f"{path}: {error.message}", field=error.field) from error
