"""What was measured once for a level and must not change under it: a small JSON file in its directory.

Flash attention decides how V is laid out. If a noisy measurement chose anew at every start, everything stored under the
other choice would be foreign; so the first choice for a model stays with the directory. The kind of K/V pool changes
nothing of what is stored; it is kept so that starts are quick and alike. A file that cannot be read or written costs a
new measurement, nothing else.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from strata.errors import DamagedFile
from strata.store.filesystem import Filesystem
from strata.store.names import CHOICES_NAME, TEMPORARY

log = logging.getLogger(__name__)

MAX_CHOICES_BYTES = 1 << 20
_POOL = "pool: "


class Choices:
    """The choices kept in one directory. Use it from the process that holds the directory's lock."""

    def __init__(self, fs: Filesystem, root: Path) -> None:
        self._fs = fs
        self._path = root / CHOICES_NAME

    def __repr__(self) -> str:
        return f"Choices({str(self._path)!r})"

    def flash_attention(self, model: str) -> bool | None:
        """What was chosen for this model; None when nothing was, or the file cannot be used."""
        return self._read().get(model)

    def split_pool(self, use: str) -> bool | None:
        """The same of the kind of pool; `use`: the model, and what else the choice depends on."""
        return self._read().get(_POOL + use)

    def keep_flash_attention(self, model: str, chosen: bool) -> None:
        """Keep the choice for this model, durably."""
        self._keep(model, chosen, "of flash attention")

    def keep_split_pool(self, use: str, chosen: bool) -> None:
        self._keep(_POOL + use, chosen, "of the K/V pool")

    def _keep(self, key: str, chosen: bool, what: str) -> None:
        content = msgspec.json.encode(self._read() | {key: chosen})
        temporary = self._path.with_name(CHOICES_NAME + TEMPORARY)
        try:
            if any(entry.name == temporary.name for entry in self._fs.entries(self._path.parent)):
                self._fs.unlink(temporary)
            self._fs.write(temporary, [content])
            self._fs.fsync(temporary)
            self._fs.replace(temporary, self._path)
            self._fs.sync_dir(self._path.parent)
        except OSError as error:
            log.warning("%s: the choice %s was not kept: %s", self._path, what, error)

    def _read(self) -> dict[str, bool]:
        try:
            return msgspec.json.decode(self._fs.read(self._path, MAX_CHOICES_BYTES), type=dict[str, bool])
        except FileNotFoundError:
            return {}
        except (OSError, DamagedFile, msgspec.MsgspecError) as error:
            log.warning("%s cannot be used (%s): what it holds is measured again", self._path, error)
            return {}
