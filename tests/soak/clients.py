"""Clients of the soak: random conversations on both OpenAI routes, streamed and whole, with forks, edits and leaving.

Every conversation has a word of its own near its beginning (a canary), and says which words its history holds: any
other in a reply is a leak. Replies are greedy, so the reply to a prompt that was sent before is compared with that one;
they may differ, because a token's logits depend on what shares the batch and on where its cells lie (see `Finding`).
"""

from __future__ import annotations

import copy
import json
import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

ANSWER_S = 120.0
CLIENT_TALKS = 6
"""Most conversations that a client goes on with."""
MOST_TOKENS = 1100
"""A conversation of more tokens is not continued."""
SENTENCE_TOKENS = 24
STRANGER_TOKENS = 128
"""Of another key's conversation, a key may know the system prompt and the header, which are shorter than this."""
KEYS = ("soak-key-a", "soak-key-b", "soak-key-c")
SYSTEMS = tuple(
    " ".join(f"Rule {i}{letter}: answer in short sentences, and mind rule {i * 7 % 31}." for i in range(5))
    for letter in "xyz"
)
_LIMITS = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)


@dataclass(slots=True, kw_only=True)
class Talk:
    """One conversation as its client remembers it. `words`: all canaries in its history; `tokens`: of its last turn."""

    route: str  # "chat" or "text"
    key: int
    words: list[str]
    messages: list[dict[str, str]]
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    text: str
    header: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(slots=True, kw_only=True)
class Finding:
    """What all clients saw. `refused`: with 429 or 503, as the limits ask for. `differing`: of the `repeated` prompts,
    those whose reply was another one than before."""

    counts: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    leaks: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class World:
    """What the clients share: all canaries there are, all replies, who has copied whose conversation.

    `recent`: the conversations in the order of their last turns.
    """

    found: Finding = field(default_factory=Finding)
    words: set[str] = field(default_factory=set)
    replies: dict[str, str] = field(default_factory=dict)
    copied: set[tuple[int, str]] = field(default_factory=set)
    recent: list[Talk] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, talk: Talk, prompt: str, answer: Answer) -> None:
        with self.lock:
            found = self.found
            found.counts["answers"] += 1
            found.sources[answer.header.split(";")[0].removeprefix("source=")] += 1
            leaked = [word for word in self.words if word in answer.text and word not in talk.words]
            found.leaks += [f"{word} in a conversation of {talk.words}: {answer.text!r}" for word in leaked]
            before = self.replies.get(prompt)
            longer = answer.text if before is None else max(before, answer.text, key=len)
            if before is not None:
                found.counts["repeated"] += 1
                if not longer.startswith(min(before, answer.text, key=len)):
                    found.differing.append(f"{before!r} became {answer.text!r}")
            self.replies[prompt] = longer


class Client:
    """One client. `stop` ends it between two requests."""

    def __init__(self, number: int, seed: int, world: World) -> None:
        self.talks: list[Talk] = []
        self._rng = random.Random(seed * 1000 + number)
        self._world = world

    def talk(self, url: str, stop: threading.Event) -> None:
        with httpx.Client(base_url=url, timeout=ANSWER_S) as http:
            while not stop.is_set():
                try:
                    self.step(http)
                except httpx.HTTPStatusError as error:
                    if error.response.status_code in _LIMITS:
                        self._count("refused")
                        stop.wait(self._rng.uniform(0.2, 1.0))
                    else:
                        self._fail(f"{error}: {error.response.text}")
                except (httpx.HTTPError, AssertionError) as error:
                    self._fail(repr(error))

    def _count(self, what: str) -> None:
        with self._world.lock:
            self._world.found.counts[what] += 1

    def _fail(self, what: str) -> None:
        with self._world.lock:
            self._world.found.failures.append(what)

    # ---------------------------------------------------------------------------------------------------------- actions

    def step(self, http: httpx.Client) -> None:
        going = [talk for talk in self.talks if talk.tokens < MOST_TOKENS]
        kinds, weights = ["new", "next", "fork", "edit", "repeat", "leave", "copy"], [2, 8, 2, 2, 2, 4, 1]
        kind = self._rng.choices(kinds, weights)[0]
        if kind == "new" or not going:
            self.turn(http, self.new())
            return
        talk = self._rng.choice(going)
        if kind == "next":
            self.turn(http, talk)
        elif kind == "repeat":
            self._count("repeats")
            self.ask(http, talk, talk.messages[:-1])
        elif kind == "leave":
            self.leave(http, talk if self._rng.random() < 0.7 else self.new())
        elif kind == "copy":
            self.copy(http, talk)
        else:
            self._count(kind + "s")
            self.turn(http, self.branch(talk, edits=kind == "edit"))

    def new(self) -> Talk:
        key = self._rng.randrange(len(KEYS))
        route = self._rng.choices(["chat", "text"], [3, 1])[0]
        word = self._word()
        return Talk(route=route, key=key, words=[word], messages=[{"role": "system", "content": SYSTEMS[key]}])

    def _word(self) -> str:
        word = "".join(self._rng.choices("bdfgklmnprstvz", k=4)) + "".join(self._rng.choices("aeiouxyq", k=4))
        with self._world.lock:
            self._world.words.add(word)
        return word

    def branch(self, talk: Talk, *, edits: bool) -> Talk:
        """The same up to a prompt, which is put differently (an edit), or up to a reply (a fork)."""
        child = copy.deepcopy(talk)
        prompts = [i for i, message in enumerate(talk.messages) if message["role"] == "user"]
        at = self._rng.choice(prompts)
        del child.messages[at if edits else at + 2 :]
        if at == prompts[0] and edits:
            child.words = [self._word()]
        elif not edits:
            child.words = [*talk.words, self._word()]
        return child

    def prompt(self, talk: Talk, sentences: int) -> list[dict[str, str]]:
        rng, word = self._rng, talk.words[-1]
        lines = (f"{word} has {rng.randrange(1000)} of item {rng.randrange(1000)}." for _ in range(sentences))
        text = f"My word is {word}. {' '.join(lines)} Repeat my word."
        return [*talk.messages, {"role": "user", "content": text}]

    def turn(self, http: httpx.Client, talk: Talk) -> Answer:
        """One more turn of a conversation, which is remembered from then on."""
        sentences = self._rng.randrange(5, 15) if len(talk.messages) < 2 else self._rng.randrange(1, 4)
        messages = self.prompt(talk, sentences)
        answer = self.ask(http, talk, messages)
        talk.messages = [*messages, {"role": "assistant", "content": answer.text}]
        talk.tokens = answer.prompt_tokens + answer.completion_tokens
        self.talks = [*(other for other in self.talks if other is not talk), talk][-CLIENT_TALKS:]
        with self._world.lock:
            self._world.recent = [*(other for other in self._world.recent if other is not talk), talk][-CLIENT_TALKS:]
        return answer

    def copy(self, http: httpx.Client, talk: Talk) -> None:
        """Another key asks the very same: it gets nothing of what this one has stored."""
        other = copy.deepcopy(talk)
        other.key = (talk.key + 1) % len(KEYS)
        marks = {(other.key, word) for word in talk.words}
        with self._world.lock:
            is_first = not marks & self._world.copied
            self._world.copied |= marks
        answer = self.ask(http, other, talk.messages[:-1])
        if is_first and answer.cached_tokens > STRANGER_TOKENS:
            with self._world.lock:
                self._world.found.leaks.append(f"{answer.header} for another key's conversation {talk.words}")
        self._count("copies")

    def leave(self, http: httpx.Client, talk: Talk) -> None:
        """Ask much, and go away: in the queue, while the prompt is read, or while the reply is written."""
        self._count("left")
        most = max(3, (MOST_TOKENS - talk.tokens) // SENTENCE_TOKENS)
        body = self.body(talk, self.prompt(talk, self._rng.randrange(2, most)), max_tokens=60)
        body |= {"ignore_eos": True, "stream": self._rng.random() < 0.6}
        patience = httpx.Timeout(ANSWER_S, read=self._rng.choice([0.01, 0.1, 0.3, 1.0, 2.0]))
        lines = self._rng.choice([1, 2, 5, 10, 1000])
        try:
            with http.stream("POST", path(talk), json=body, headers=head(talk), timeout=patience) as response:
                response_raise(response)
                for n, _ in enumerate(response.iter_lines()):
                    if n >= lines:
                        break
        except httpx.ReadTimeout:
            self._count("left_before_the_end")

    # --------------------------------------------------------------------------------------------------------- requests

    def body(self, talk: Talk, messages: list[dict[str, str]], *, max_tokens: int) -> dict[str, Any]:
        asked: dict[str, Any] = {"messages": messages}
        if talk.route == "text":
            asked = {"prompt": "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant:"}
        return {**asked, "max_tokens": max_tokens, "temperature": 0}

    def ask(self, http: httpx.Client, talk: Talk, messages: list[dict[str, str]]) -> Answer:
        body = self.body(talk, messages, max_tokens=self._rng.randrange(2, 16))
        if self._rng.random() < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            answer = streamed(http, talk, body)
        else:
            response = http.post(path(talk), json=body, headers=head(talk))
            response_raise(response)
            whole = response.json()
            answer = answer_of(text_of(whole["choices"][0]), whole["usage"], response)
        self._world.note(talk, json.dumps([talk.route, messages]), answer)
        return answer


def path(talk: Talk) -> str:
    return "/v1/completions" if talk.route == "text" else "/v1/chat/completions"


def head(talk: Talk) -> dict[str, str]:
    return {"X-Api-Key": KEYS[talk.key]}


def response_raise(response: httpx.Response) -> None:
    if response.is_error:
        response.read()
    response.raise_for_status()


def text_of(choice: dict[str, Any]) -> str:
    part = choice.get("message") or choice.get("delta") or choice
    return part.get("content") or part.get("text") or ""


def answer_of(text: str, usage: dict[str, Any], response: httpx.Response) -> Answer:
    return Answer(
        text=text,
        header=response.headers.get("x-strata-cache", "source=late"),
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        completion_tokens=usage["completion_tokens"],
    )


def streamed(http: httpx.Client, talk: Talk, body: dict[str, Any]) -> Answer:
    text, usage, ended = "", None, False
    with http.stream("POST", path(talk), json=body, headers=head(talk)) as response:
        response_raise(response)
        for line in response.iter_lines():
            ended |= line == "data: [DONE]"
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            usage = chunk.get("usage") or usage
            text += "".join(map(text_of, chunk["choices"]))
    assert ended and usage is not None, "a stream ended without [DONE] or usage"
    return answer_of(text, usage, response)
