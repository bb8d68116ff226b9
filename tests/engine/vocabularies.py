"""Vocabularies without a model, made so that special tokens get in each other's way.

Their special tokens overlap, contain and begin each other, hold white space, and are made of ordinary letters too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import llama_cpp.llama_cpp as api
from gguf import GGUFReader, GGUFWriter, TokenType

from strata.engine.llama import Vocabulary

CLEAN = ["[INST]", "<turn>"]
"""Special tokens that nothing gets in the way of."""
TANGLED = ["<|open|>", "<|close|>", "ab", "ba", "aba", "xab|", "<|op", "en|>x", "|><|", "  ", "\n\n", " <q> ", "a▁b"]
ORDINARY = ["a", "b", "x", " ", "\n", "<", ">", "|", "o", "é", "漢", "▁", "  a", "open", "a b", "xab"]
ALPHABET = [*CLEAN, *TANGLED, *ORDINARY]
"""Pieces to make texts of."""
_LETTERS = [*"abxopenqclstur<>|[]INST\n▁"]


def _types(special: int) -> list[int]:
    return [TokenType.CONTROL if i % 2 else TokenType.USER_DEFINED for i in range(special)]


class VocabularyFile:
    """A GGUF of nothing but a vocabulary, loaded as such; closed at the end of the tests that use it."""

    def __init__(self, path: Path, kind: str, tokens: Sequence[str], types: Sequence[int], *, name: str = "") -> None:
        self.kind = kind
        self._path = path
        self.writer = GGUFWriter(path, "llama")
        self.writer.add_string("general.name", name or path.stem)
        self.writer.add_string("tokenizer.ggml.model", kind)
        self.writer.add_token_list(list(tokens))
        self.writer.add_token_types(list(types))

    def load(self) -> Vocabulary:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.close()
        params = api.llama_model_default_params()
        params.vocab_only = True
        self.model = api.llama_model_load_from_file(str(self._path).encode(), params)
        assert self.model, "llama.cpp does not take this vocabulary"
        return Vocabulary(api.llama_model_get_vocab(self.model))


def spm(path: Path, *, space_prefix: bool = True, name: str = "") -> VocabularyFile:
    """SentencePiece: bytes, letters, some pairs; `name` "phi-3" makes special tokens swallow the space behind them."""
    special = [*CLEAN, *TANGLED, "<|endoftext|>"]
    pairs = ["▁a", "▁▁", "ab", "▁b", "<|", "|>", "en", "op", "open", "▁op", "x▁"]
    pairs = [pair for pair in pairs if pair not in special]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_LETTERS, *pairs, *special]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    types += [TokenType.NORMAL] * (len(_LETTERS) + len(pairs)) + _types(len(special))
    file = VocabularyFile(path, "llama", tokens, types, name=name)
    file.writer.add_token_scores([-float(i) for i in range(len(tokens))])
    file.writer.add_bool("tokenizer.ggml.add_space_prefix", space_prefix)
    file.writer.add_uint32("tokenizer.ggml.bos_token_id", 1)
    file.writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    return file


def bpe(path: Path, source: GGUFReader) -> VocabularyFile:
    """Byte-pair encoding as in SmolLM2, with more special tokens."""
    fields = source.fields
    special = [*CLEAN, *TANGLED, "Ġ<"]
    tokens = [token for token in fields["tokenizer.ggml.tokens"].contents()[:4000] if token not in special]
    types = fields["tokenizer.ggml.token_type"].contents()[: len(tokens)]
    file = VocabularyFile(path, "gpt2", [*tokens, *special], [*types, *_types(len(special))])
    file.writer.add_string("tokenizer.ggml.pre", fields["tokenizer.ggml.pre"].contents())
    known = set(tokens)
    merges = fields["tokenizer.ggml.merges"].contents()[:6000]
    file.writer.add_token_merges([merge for merge in merges if merge.replace(" ", "") in known])
    return file


def bpe_with_spaces(path: Path) -> VocabularyFile:
    """Byte-pair encoding whose spaces are written as in SentencePiece, as Gemma 4 has it."""
    special = [*CLEAN, *TANGLED]
    pairs = [a + b for a, b in pairwise("open")] + ["▁a", "▁▁", "<|", "|>"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *_LETTERS, *pairs, *special]
    types = [TokenType.UNKNOWN, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * (len(_LETTERS) + len(pairs))]
    file = VocabularyFile(path, "gemma4", tokens, [*types, *_types(len(special))])
    file.writer.add_token_merges([f"{pair[0]} {pair[1]}" for pair in pairs])
    return file
