"""What a witness noted (witness.py), and what of it must be on disk after the process was killed at that point.

Covers the rules of letting go: an entry may be dropped when its whole state is acknowledged elsewhere, when a newer
state of the same conversation is acknowledged, or on the last level.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Note = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Owed:
    """`entries`: by level and serial, what must be there. `maybe`: what may be there too: (level, serial)."""

    entries: dict[str, dict[int, Note]] = field(default_factory=dict)
    maybe: set[tuple[str, int]] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


def notes(path: Path) -> Iterator[Note]:
    """Every whole line."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield json.loads(line)


def replay(path: Path, last_level: str) -> Owed:
    """Follow the notes of one life to its end."""
    owed = Owed()
    for note in notes(path):
        what = note["what"]
        owed.counts[what] = owed.counts.get(what, 0) + 1
        match what:
            case "opened" | "acknowledged":
                owed.maybe.discard((note["level"], note["serial"]))
                owed.entries.setdefault(note["level"], {})[note["serial"]] = note
            case "commit":
                owed.maybe.add((note["level"], note["serial"]))
            case "drop":
                _let_go(owed, note, last_level)
            case "restored":
                if note["wrong"] or note["failed"]:
                    owed.wrong.append(f"restored wrongly: {note}")
                for name in ("right", "wrong"):
                    owed.counts[name] = owed.counts.get(name, 0) + note[name]
            case "quarantine" | "check":
                owed.wrong.append(f"{what}: {note}")
    return owed


def _let_go(owed: Owed, note: Note, last_level: str) -> None:
    gone = owed.entries.get(note["level"], {}).pop(note["serial"], None)
    owed.maybe.add((note["level"], note["serial"]))
    if gone is None or note["level"] == last_level:
        return
    others = [entry for entries in owed.entries.values() for entry in entries.values()]
    moved = any(entry["keys"][-1] == gone["keys"][-1] for entry in others)
    newer = any(
        entry["conversation"] == gone["conversation"]
        and entry["keys"][: gone["fixed"]] == gone["keys"][: gone["fixed"]]
        and entry["born"] >= gone["born"]
        for entry in others
    )
    if not moved and not newer:
        owed.wrong.append(f"dropped from {note['level']} without a copy elsewhere: {gone['serial']}")
