"""What happened to conversations, in order, with reasons: a bounded tail for people, and one log line each.

No prompt text, no keys of clients: a conversation is named by the first 12 hex digits of its conversation key.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

log = logging.getLogger("strata.story")

KEPT_EVENTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryEvent:
    """One thing that happened to one conversation. `verb` is one of DESIGN §1's words."""

    at_s: float
    conversation: str
    verb: str
    detail: str


class Story:
    """The last events of all conversations, oldest first."""

    def __init__(self) -> None:
        self._events: deque[StoryEvent] = deque(maxlen=KEPT_EVENTS)

    def tell(self, at_s: float, conversation: bytes, verb: str, detail: str) -> None:
        event = StoryEvent(at_s=at_s, conversation=conversation.hex()[:12], verb=verb, detail=detail)
        self._events.append(event)
        log.info("%s %s: %s", event.verb, event.conversation, event.detail)

    def events(self) -> tuple[StoryEvent, ...]:
        return tuple(self._events)
