"""Prompts tokenised from where they leave an earlier one: exactly the whole text's tokens, whatever the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.rig import Rig
from tests.engine.vocabularies import ALPHABET, CLEAN, TANGLED, VocabularyFile, bpe, bpe_with_spaces, spm

from strata.engine import prompts as limits
from strata.engine.cutting import Cutter
from strata.engine.llama import Model, Vocabulary
from strata.engine.prompts import Prompts, shared_bytes
from strata.types import Tokens

KINDS = ["smollm2", "bpe", "spm", "spm without a space", "spm that swallows", "bpe with spaces"]
CHATML = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_start|>user\n", "<|im_end|>\n", " 42", "naïve", "🦊"]


@pytest.fixture(scope="session")
def vocabularies(
    tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, models: Callable[[str], Model]
) -> dict[str, tuple[Vocabulary, str]]:
    """Each with its kind. The files are read completely at the start."""
    folder = tmp_path_factory.mktemp("vocabularies")
    files: dict[str, VocabularyFile] = {
        "bpe": bpe(folder / "bpe.gguf", GGUFReader(smollm2_path)),
        "spm": spm(folder / "spm.gguf"),
        "spm without a space": spm(folder / "plain.gguf", space_prefix=False),
        "spm that swallows": spm(folder / "swallows.gguf", name="tiny phi-3"),
        "bpe with spaces": bpe_with_spaces(folder / "spaces.gguf"),
    }
    loaded = {name: (file.load(), file.kind) for name, file in files.items()}
    return {"smollm2": (models("smollm2").vocabulary, "gpt2"), **loaded}


@pytest.fixture
def all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LEAST_BYTES", 0)


pieces = st.lists(st.sampled_from([*6 * CLEAN, *ALPHABET, *2 * CHATML]), max_size=12).map("".join)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.usefixtures("all_kept")
def test_the_tokens_are_those_of_the_whole_text(name: str, vocabularies: dict[str, tuple[Vocabulary, str]]) -> None:
    vocabulary, kind = vocabularies[name]
    reused = 0

    @settings(max_examples=400, deadline=None, derandomize=True)
    @given(pieces, st.lists(st.tuples(st.integers(0, 60), pieces), min_size=1, max_size=6))
    def hold(first: str, changes: list[tuple[int, str]]) -> None:
        """Every prompt is an earlier one, cut somewhere, with other text behind."""
        nonlocal reused
        prompts, text = Prompts(vocabulary, kind), first
        prompts.tokenize(text, "me")
        for keep, more in changes:
            text = text[:keep] + more
            tokens, n = prompts.tokenize(text, "me")
            assert tokens.tolist() == whole(vocabulary, text)
            reused += n > 0

    hold()
    assert reused > 300, "the property was hardly tried"


def whole(vocabulary: Vocabulary, text: str) -> list[int]:
    """The oracle: llama.cpp's tokens of all of it, and one BOS if the vocabulary wants it."""
    tokens = vocabulary.tokenize(text).tolist()
    return [vocabulary.bos, *tokens] if vocabulary.adds_bos and tokens[:1] != [vocabulary.bos] else tokens


@given(st.lists(st.text("ab<>", min_size=1, max_size=4), min_size=1, max_size=6, unique=True), st.text("ab<>"))
def test_a_clean_token_is_found_wherever_it_is_written(written: list[str], text: str) -> None:
    """Against an oracle of how special tokens are taken out of a text, with every order among those of one length."""
    cutter = Cutter({i: word.encode() for i, word in enumerate(written)}, len(written))
    clean = [word for i, word in enumerate(written) if cutter.is_clean(i)]
    for order in (written, written[::-1]):
        found = taken_out(text, sorted(order, key=len, reverse=True))
        for word in clean:
            assert [at for at, taken in found if taken == word] == [
                at for at in range(len(text)) if text.startswith(word, at)
            ]


def taken_out(text: str, words: list[str], base: int = 0) -> list[tuple[int, str]]:
    """Where each word is found: the first in the list first, from left to right, and the next in what is left."""
    if not words or not text:
        return []
    at = text.find(words[0])
    if at < 0:
        return taken_out(text, words[1:], base)
    behind = at + len(words[0])
    return [
        *taken_out(text[:at], words[1:], base),
        (base + at, words[0]),
        *taken_out(text[behind:], words, base + behind),
    ]


def test_which_tokens_are_clean() -> None:
    def clean(*words: str) -> list[str]:
        cutter = Cutter({i: word.encode() for i, word in enumerate(words)}, len(words))
        return [word for i, word in enumerate(words) if cutter.is_clean(i)]

    assert clean(*CLEAN, *TANGLED) == CLEAN
    assert clean("[INST]", "[", "IN", "[INST]?", "<q>?") == ["[INST]?", "<q>?"], "what is within another"
    assert clean("<a>", ">b") == [] and clean("<a>", "<b>", "a") == ["<a>", "<b>"]
    assert clean("aba", " x", "\n", "") == []


@given(st.binary(max_size=40), st.binary(max_size=10), st.binary(max_size=10))
def test_shared_bytes(head: bytes, a: bytes, b: bytes) -> None:
    n = shared_bytes(head + a, head + b)
    assert (head + a)[:n] == (head + b)[:n]
    assert (head + a)[n : n + 1] != (head + b)[n : n + 1] or n in (len(head + a), len(head + b))


@pytest.mark.parametrize("n", [0, 1, 65535, 65536, 65537, 200_000])
def test_shared_bytes_of_long_texts(n: int) -> None:
    same = bytes(n)
    assert shared_bytes(same + b"a", same + b"b") == shared_bytes(same, same + b"b") == shared_bytes(same, same) == n


# ------------------------------------------------------------------------------------------------------- what is kept

LONG = "The fox reads every evening. " * 200


def turn(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n"


class Counting:
    """A real vocabulary that counts the bytes it was asked to tokenise."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.n_tokens, self.bos, self.adds_bos = vocabulary.n_tokens, vocabulary.bos, vocabulary.adds_bos
        self.n_bytes = 0

    def specials(self) -> dict[int, bytes]:
        return self._vocabulary.specials()

    def tokenize(self, text: bytes) -> Tokens:
        self.n_bytes += len(text)
        return self._vocabulary.tokenize(text)

    def spent(self) -> int:
        n, self.n_bytes = self.n_bytes, 0
        return n


@pytest.fixture
def counting(models: Callable[[str], Model]) -> Iterator[Counting]:
    yield Counting(models("smollm2").vocabulary)


def test_only_what_is_new_is_tokenised(counting: Counting) -> None:
    prompts = Prompts(counting, "gpt2")
    text = turn(LONG) + "<|im_start|>assistant\n"
    prompts.tokenize(text, "me")
    assert counting.spent() == len(text)
    longer = text + "Yes.<|im_end|>\n" + turn("And?")
    tokens, reused = prompts.tokenize(longer, "me")
    assert counting.spent() == len(longer) - text.rindex("<|im_start|>")
    assert reused == tokens.tolist().index(1, 5)
    prompts.tokenize(turn(LONG + "!") + turn("Else?"), "me")
    assert counting.spent() == len(turn(LONG + "!") + turn("Else?")), "the first turn differs"
    assert prompts.tokenize(longer, "me")[1] > reused
    assert counting.spent() == len("<|im_end|>\n"), "it is still known"


def test_each_owner_has_its_own(counting: Counting) -> None:
    prompts = Prompts(counting, "gpt2")
    text = turn("x") + turn(LONG) + turn("a")
    assert prompts.tokenize(text, "me")[1] == 0
    assert prompts.tokenize(text, "you")[1] == 0
    assert prompts.tokenize(text, "")[1] == 0
    assert prompts.tokenize(text, None)[1] == 0
    assert prompts.tokenize(text, "me")[1] > 0 and prompts.tokenize(text, "")[1] > 0


def test_a_prompt_of_nobody_is_not_kept(counting: Counting) -> None:
    prompts = Prompts(counting, "gpt2")
    prompts.tokenize(turn(LONG) + turn("a"), None)
    assert prompts.nbytes == 0
    assert prompts.tokenize(turn(LONG) + turn("a"), "me")[1] == 0


def test_a_kind_of_vocabulary_that_nobody_proved(counting: Counting) -> None:
    for kind in ("bert", "t5", None):
        prompts = Prompts(counting, kind)
        assert [prompts.tokenize(turn(LONG) + turn("a"), "me")[1] for _ in range(2)] == [0, 0]
        assert prompts.nbytes == 0


def test_the_longest_unused_goes_first(counting: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_PROMPTS", 3)
    prompts = Prompts(counting, "gpt2")
    chats = [turn(f"{i} {LONG}") + turn("b") for i in range(4)]
    for chat in chats[:3]:
        prompts.tokenize(chat, "me")
    prompts.tokenize(chats[0] + turn("c"), "me")  # used: now the second is the oldest
    prompts.tokenize(chats[3], "me")
    assert [prompts.tokenize(chat, "me")[1] > 0 for chat in (chats[0], chats[2], chats[3])] == [True] * 3
    assert prompts.tokenize(chats[1], "me")[1] == 0


def test_what_could_not_save_anything_is_not_kept(counting: Counting) -> None:
    prompts = Prompts(counting, "gpt2")
    for text in (LONG, "<|im_start|>" + LONG):
        assert [prompts.tokenize(text, "me")[1] for _ in range(2)] == [0, 0]
    assert prompts.nbytes == 0
    prompts.tokenize(turn(LONG), "me")
    kept = prompts.nbytes
    prompts.tokenize(turn(LONG), "me")
    prompts.tokenize(turn(LONG)[:-1], "me")
    assert prompts.nbytes == kept > 0, "the same again, or a part of it"


def test_short_prompts_do_not_push_out_a_long_one(counting: Counting) -> None:
    prompts = Prompts(counting, "gpt2")
    text = turn(LONG) + turn("a")
    prompts.tokenize(text, "me")
    for i in range(2 * limits.MOST_PROMPTS):
        prompts.tokenize(turn(f"A title for {i}?"), "me")
    assert prompts.tokenize(text, "me")[1] > 0


def test_the_memory_is_bounded(counting: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 100_000
    monkeypatch.setattr(limits, "MOST_BYTES", most)
    prompts = Prompts(counting, "gpt2")
    for i in range(20):
        prompts.tokenize(turn(f"{i} {LONG}") + turn("b"), f"owner {i % 3}")
        assert 0 < prompts.nbytes <= most
    prompts.tokenize(turn(LONG * 20), "me")
    assert 0 < prompts.nbytes <= most, "one that is too large alone takes nobody's place"


def test_a_growing_chat_is_kept_once(counting: Counting) -> None:
    prompts, text = Prompts(counting, "gpt2"), turn(LONG)
    for i in range(20):
        text += turn(f"question {i}")
        prompts.tokenize(text, "me")
    assert prompts.nbytes < 12 * len(text), "each prompt goes on from the one before, which is forgotten"


def test_many_kinds_of_special_tokens(counting: Counting) -> None:
    """More kinds than are looked for: the most frequent ones count."""
    kinds = [text.decode() for text in counting.specials().values()]
    assert len(kinds) > 12
    prompts = Prompts(counting, "gpt2")
    text = "".join(kinds) + turn(LONG) * 3
    prompts.tokenize(text, "me")
    tokens, reused = prompts.tokenize(text + "more", "me")
    assert reused > 0 and np.array_equal(tokens, counting.tokenize((text + "more").encode()))


# ------------------------------------------------------------------------------------------------------- one BOS only


def test_bos_is_there_exactly_once(counting: Counting) -> None:
    prompts = Prompts(counting, "gpt2")
    assert not counting.adds_bos
    assert prompts.tokenize("hi", "me")[0].tolist() == counting.tokenize(b"hi").tolist()
    counting.adds_bos = True
    written = counting.specials()[counting.bos].decode() + "hi"
    for owner in ("me", None):
        assert prompts.tokenize("hi", owner)[0].tolist() == [counting.bos, *counting.tokenize(b"hi").tolist()]
        assert prompts.tokenize(written, owner)[0].tolist() == prompts.tokenize("hi", owner)[0].tolist()
        assert prompts.tokenize("", owner)[0].tolist() == [counting.bos]


# ------------------------------------------------------------------------------------------------ the engine process


def test_the_engine_remembers_by_owner(rig: Rig) -> None:
    text = turn(LONG) + turn("a") + "<|im_start|>assistant\n"

    def prepare(owner: str | None) -> tuple[bytes, int]:
        prepared = rig.do(rig.client.prepare(text=text, owner=owner))
        return prepared.tokens, prepared.reused

    first, none = prepare("alice")
    again, reused = prepare("alice")
    other, of_another = prepare("bob")
    assert first == again == other == prepare(None)[0]
    assert none == of_another == prepare(None)[1] == 0 and reused > 500
