"""What the web hands to the server for one request, and what comes back: values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from strata.engine.protocol import Sampling, Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """One completion to make. Exactly one of `messages` and `text` is given.

    `messages`: [{"role": str, "content": str}, ...], already checked. `namespace` isolates API keys from each other.
    `max_tokens` None = until the context ends. `cache_prompt` False = neither reuse nor keep anything of this request.
    """

    namespace: str = ""
    messages: tuple[dict[str, Any], ...] | None = None
    text: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    cache_prompt: bool = True

    @property
    def has_instructions(self) -> bool:
        """Whether what it begins with is a system prompt: not a user's message. Of `text` only its client knows."""
        return self.messages is None or (bool(self.messages) and self.messages[0]["role"] in ("system", "developer"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """Where the reused prefix of a request came from.

    `source`: "none" | "live" | "fork" | "cold" | "live+cold" ... as shown in the x-strata-cache header.
    `reused` of `total` prompt tokens were not read again. `restore_s`: None when no restore was tried.
    """

    source: str
    reused: int
    total: int
    restore_s: float | None = None

    def header(self) -> str:
        """The value of the x-strata-cache response header (SPEC §12)."""
        text = f"source={self.source}; reused={self.reused}/{self.total}"
        return text if self.restore_s is None else f"{text}; restore_ms={self.restore_s * 1000:.0f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """First event: the prompt is tokenised, fits the context and waits for a slot. Errors before this are raised."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """No slot is idle: the place in the queue, from 1, of `total` that wait."""

    position: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A slot is taken and its state restored; reading begins."""

    slot: int
    cache: CacheReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Progress of prompt reading."""

    held: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """The K/V pool has no room: the request waits for some, before it begins or in the middle of its reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """New generated text; `n_tokens` tokens came with it. Either may be empty / 0."""

    text: str
    n_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """Last event. `reason`: "stop" | "length" | "cancelled". cached_tokens == prompt tokens not read again."""

    reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cache: CacheReport
    timing: Timing
    stop_string: str | None = None


TurnEvent = Admitted | Waiting | Started | Reading | Parked | Text | Completed
