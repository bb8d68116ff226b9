"""Names of the files in a level's directory, and back: pure.

Covers final names, and the suffixes that a temporary or quarantined file carries behind its final name. It does not say
which files exist.
"""

from __future__ import annotations

import re

from strata.types import Key

SEGMENT_DIR = "seg"
CHOICES_NAME = "strata-choices.json"
ARCHIVE_FOLDER = "archive"
SYSTEM_PROMPTS_FOLDER = "system-prompts"
FOREIGN_FOLDERS = (ARCHIVE_FOLDER, SYSTEM_PROMPTS_FOLDER)
"""Folders in a level's directory that are not the level's: each has a lock, a scan and a budget of its own."""
TEMPORARY = ".tmp"
QUARANTINED = ".bad"
MAX_STAGES = 64
MAX_SERIAL = (1 << 53) - 1
"""The largest integer that every JSON reader keeps exact."""

_MANIFEST = re.compile(r"strata-conv-(\d{8,16})\.meta")
_TEMPORARY_TAIL = re.compile(r"\.\d+-\d+\.tmp$")
_QUARANTINED_TAIL = re.compile(r"\.\d+\.bad$")
_SEGMENT = re.compile(r"([0-9a-f]{64})\.s(\d{1,2})\.seg")
_CHECKPOINT = re.compile(r"([0-9a-f]{64})\.ckpt")


def manifest_name(serial: int) -> str:
    return f"strata-conv-{serial:08d}.meta"


def parse_manifest_name(name: str) -> int | None:
    """The serial, or None when `name` is not exactly what `manifest_name` gives for one."""
    serial = serial_in(name)
    return serial if 0 < serial <= MAX_SERIAL and manifest_name(serial) == name else None


def serial_in(name: str) -> int:
    """The serial of a manifest's final, temporary or quarantined name; 0 for any other name."""
    found = _MANIFEST.match(name)
    return int(found[1]) if found else 0


def segment_path(key: Key, stage: int) -> str:
    """Relative to the level's directory, with forward slashes."""
    name = key.hex()
    return f"{SEGMENT_DIR}/{name[:2]}/{name}.s{stage}.seg"


def parse_segment_name(name: str) -> tuple[Key, int] | None:
    """Key and stage of a file name without its directories, or None when it is not exactly a segment's."""
    found = _SEGMENT.fullmatch(name)
    if found is None:
        return None
    key, stage = Key(bytes.fromhex(found[1])), int(found[2])
    return (key, stage) if stage < MAX_STAGES and segment_path(key, stage).endswith("/" + name) else None


def parse_segment_path(path: str) -> tuple[Key, int] | None:
    """Like `parse_segment_name`, for a path relative to the level's directory, which must be the right one."""
    parsed = parse_segment_name(path.rpartition("/")[2])
    return parsed if parsed is not None and segment_path(*parsed) == path else None


def checkpoint_path(key: Key) -> str:
    """Relative to the level's directory, with forward slashes."""
    name = key.hex()
    return f"{SEGMENT_DIR}/{name[:2]}/{name}.ckpt"


def parse_checkpoint_path(path: str) -> Key | None:
    """The key, or None when `path` is not exactly what `checkpoint_path` gives for one."""
    found = _CHECKPOINT.fullmatch(path.rpartition("/")[2])
    key = Key(bytes.fromhex(found[1])) if found else None
    return key if key is not None and checkpoint_path(key) == path else None


def is_temporary(path: str) -> bool:
    """Whether a level wrote this file on the way to a final name: nobody else's file ending in .tmp is touched."""
    return _is_ours(path, _TEMPORARY_TAIL) or path == CHOICES_NAME + TEMPORARY


def is_quarantined(path: str) -> bool:
    """Whether a level set this file aside."""
    return _is_ours(path, _QUARANTINED_TAIL)


def _is_ours(path: str, tail: re.Pattern[str]) -> bool:
    final = tail.sub("", path)
    return final != path and bool(
        parse_manifest_name(final) or parse_segment_path(final) or parse_checkpoint_path(final)
    )
