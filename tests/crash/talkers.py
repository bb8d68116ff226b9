"""Clients of the kill loop: four talk at once, over several turns, fork, leave in the middle, and outlive the server.

Every conversation has a word of its own, which must never show up in the replies to another one.
"""

from __future__ import annotations

import copy
import random
import threading
from dataclasses import dataclass, field

import httpx

SYSTEM = " ".join(f"Rule {i}: answer in short sentences, and mind rule {i * 7 % 31} too." for i in range(6))
MOST_TOKENS = 900


@dataclass(slots=True, kw_only=True)
class Talk:
    """One conversation as its client remembers it. `tokens`: of prompt and reply of its last turn."""

    word: str
    messages: list[dict[str, str]]
    tokens: int = 0


@dataclass(slots=True, kw_only=True)
class Finding:
    """What the clients saw, over all lives."""

    answers: int = 0
    cancelled: int = 0
    forks: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    leaks: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class Talker:
    """One client. It takes up its conversations again whenever there is a server."""

    def __init__(self, number: int, seed: int, words: set[str], found: Finding) -> None:
        self._rng = random.Random(seed * 100 + number)
        self._words = words
        self._found = found
        self.talks: list[Talk] = []

    def talk(self, url: str, stop: threading.Event) -> None:
        """Talk until `stop`, or until server or engine are gone."""
        try:
            with httpx.Client(base_url=url, timeout=60) as client:
                while not stop.is_set():
                    self.step(client)
        except httpx.TransportError:
            pass  # the server was killed
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.SERVICE_UNAVAILABLE:  # what a dead engine answers
                self._found.failures.append(str(error))

    def step(self, client: httpx.Client) -> None:
        kind = self._rng.choices(["new", "next", "fork", "leave"], [1, 8, 2, 1])[0]
        going = [talk for talk in self.talks if talk.tokens < MOST_TOKENS]
        if kind == "leave":
            self.leave(client, self._rng.choice(going) if going else self.new())
        elif kind == "new" or not going:
            self.turn(client, self.new())
        elif kind == "next":
            self.turn(client, self._rng.choice(going))
        else:
            child = copy.deepcopy(self._rng.choice(going))
            del child.messages[self._rng.choice([2, 4]) :]  # behind the first or the second prompt
            if child.messages[-1]["role"] == "user":
                child.messages.append({"role": "assistant", "content": f"Noted, {child.word}."})
            self._found.forks += 1
            self.turn(client, child)

    def new(self) -> Talk:
        word = "".join(self._rng.choices("bdfgklmnprstvz", k=4)) + "".join(self._rng.choices("aeiouxyq", k=4))
        self._words.add(word)
        return Talk(word=word, messages=[{"role": "system", "content": SYSTEM}])

    def ask(self, talk: Talk) -> list[dict[str, str]]:
        n = self._rng.randrange(5, 9) if len(talk.messages) < 2 else self._rng.randrange(1, 3)
        lines = (f"{talk.word} has {self._rng.randrange(1000)} of item {self._rng.randrange(1000)}." for _ in range(n))
        return [
            *talk.messages,
            {"role": "user", "content": f"My word is {talk.word}. {' '.join(lines)} Repeat my word."},
        ]

    def turn(self, client: httpx.Client, talk: Talk) -> str:
        """One more turn; the x-strata-cache header of the answer."""
        messages = self.ask(talk)
        body = {"messages": messages, "max_tokens": self._rng.randrange(2, 10), "temperature": 0}
        answer = client.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        said = answer.json()["choices"][0]["message"]["content"] or ""
        self._note(talk, said, header := answer.headers["x-strata-cache"])
        talk.messages = [*messages, {"role": "assistant", "content": said}]
        talk.tokens = answer.json()["usage"]["total_tokens"]
        if talk not in self.talks:
            self.talks.append(talk)
            del self.talks[:-6]
        return str(header)

    def leave(self, client: httpx.Client, talk: Talk) -> None:
        """Ask, and go away while the reply is being written."""
        body = {"messages": self.ask(talk), "max_tokens": 60, "temperature": 0, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            for n, _ in enumerate(answer.iter_lines()):
                if n >= self._rng.randrange(1, 12):
                    break
        self._found.cancelled += 1

    def _note(self, talk: Talk, said: str, header: str) -> None:
        self._found.answers += 1
        source = header.split(";")[0].removeprefix("source=")
        self._found.sources[source] = self._found.sources.get(source, 0) + 1
        others = [word for word in list(self._words) if word != talk.word and word in said]
        self._found.leaks += [f"{word} in the conversation of {talk.word}: {said!r}" for word in others]
