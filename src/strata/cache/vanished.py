"""Files of a level that someone else removed while it was in use: its index forgets what they held.

Covers the index alone; that they are gone is noticed before a commit (Level.require). What comes again is written anew.
"""

from __future__ import annotations

import logging

from strata.cache.counters import LevelCounters
from strata.cache.state import LevelIndex
from strata.store.level import Level

log = logging.getLogger("strata.cache")


def forget_vanished(level: Level, index: LevelIndex, counters: LevelCounters) -> None:
    """Bring the index in line with the level's account, which was made anew."""
    stored = index.conversations()
    segments = {key for c in stored for key in c.objects if index.bytes_of(key) and not level.has(key)}
    entries = [c.serial for c in stored if not level.has(c.serial)]
    index.remove_conversations(entries)
    index.remove_segments(segments)
    counters.vanished += len(entries)
    message = "%s: someone removed files while it was in use: %d conversations and %d segments are lost"
    log.error(message, level.root, len(entries), len(segments))
