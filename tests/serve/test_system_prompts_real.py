"""The system-prompt cache with the real server and real models: a new conversation after a restart starts with it.

Greedy replies are compared with those of a twin that kept nothing and read everything. The system prompts end at a
multiple of the batch, so that both read in the same batches, into the same cells.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.engine.tiny_models import write_tiny_models
from tests.serve.running import RunningServer, wait_for
from tests.serve.test_restart import cached, said

from strata.engine.llama import Model
from strata.serve.wiring import find_model
from strata.store.names import SYSTEM_PROMPTS_FOLDER

BATCH = 64  # see tests/serve/running.py
SMALL = 5 * BATCH
LARGE = 47 * BATCH
KEYS = ("alpha", "beta")
SMALL_ROOT = f"--prompt-cache-root={SMALL - 50}"


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(find_model("demo"), gpu_layers=None, layer_split=(), progress=lambda done: None)


def system_of(model: Model, n_tokens: int, first: str = "You keep the keys.") -> str:
    """A system prompt that ends, as rendered, after exactly so many tokens."""

    def length(text: str) -> int:
        return len(model.vocabulary.tokenize(f"<|im_start|>system\n{text}<|im_end|>\n"))

    text, i = first, 0
    while length(text) < n_tokens - 30:
        text += f" Drawer {i} of the cabinet holds {i * 7 % 97} brass keys."
        i += 1
    while length(text) < n_tokens:
        text += " ok"
    assert length(text) == n_tokens
    return text


def ask(server: RunningServer, system: str, text: str, *, key: str = "", max_tokens: int = 24) -> tuple[Any, str]:
    """The answer, and where its prefix came from."""
    client = server.client_with(key) if key else server.client
    raw = client.chat.completions.with_raw_response.create(
        model="demo",
        messages=[{"role": "system", "content": system}, {"role": "user", "content": text}],
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    return raw.parse(), raw.headers["x-strata-cache"].split(";")[0]


@contextmanager
def server_at(tmp_path: Path, *flags: str, **more: Any) -> Iterator[RunningServer]:
    with RunningServer(tmp_path / "log", "--context=4096", *flags, **more) as server:
        yield server


def kept(folder: Path) -> tuple[str, str]:
    return "--system-prompt-cache", f"--system-prompt-cache-dir={folder}"


def counts(server: RunningServer, *names: str) -> tuple[int, ...]:
    wait_for(server.idle, "the end of all requests and parks")
    status = server.status()["system_prompts"]
    return tuple(status[name] for name in names)


@pytest.mark.slow
def test_a_long_one_after_a_restart_and_nothing_else_is_kept(tmp_path: Path, model: Model) -> None:
    system, question = system_of(model, LARGE), "Which drawer holds most keys?"
    with server_at(tmp_path) as server:
        twin = said(ask(server, system, question)[0])
    folder = tmp_path / "data" / SYSTEM_PROMPTS_FOLDER
    with server_at(tmp_path, *kept(folder)) as server:
        first, source = ask(server, system, "Say hello.", max_tokens=4)
        assert (cached(first), source) == (0, "source=none")
        assert counts(server, "hits", "misses", "written", "variants") == (0, 1, 1, 1)
        server.stop()
        assert "discards" not in server.log() and "stay in slot" not in server.log()
    assert {path.name for path in tmp_path.iterdir()} == {"log", "data"}
    with server_at(tmp_path, *kept(folder)) as server:
        answer, source = ask(server, system, question)
        assert (cached(answer), source) == (LARGE, "source=system-prompt")
        assert said(answer) == twin
        assert counts(server, "hits", "misses", "tokens_saved", "hash_changes") == (1, 0, LARGE, 0)
        status = server.status()
        assert status["levels"] == []
        assert status["system_prompts"]["level"]["folder"] == str(folder)


def test_beside_a_cold_level_for_one_key_only_and_beside_another_variant(tmp_path: Path, model: Model) -> None:
    system, cold = system_of(model, SMALL), tmp_path / "cold"
    changed = system_of(model, SMALL, "You keep the keys well.")
    with server_at(tmp_path, "--system-prompt-cache", SMALL_ROOT, cold=cold, keys=KEYS) as server:
        ask(server, system, "Say hello.")
        assert counts(server, "written") == (1,)
        server.stop()
    for path in cold.iterdir():  # what the level kept is gone, by its budget for instance
        if path.name == "seg":
            shutil.rmtree(path)
        elif path.suffix == ".meta":
            path.unlink()
    with server_at(tmp_path, "--system-prompt-cache", SMALL_ROOT, cold=cold, keys=KEYS) as server:
        assert cached(ask(server, system, "Count to three.", key="beta")[0]) == 0
        assert counts(server, "hits", "misses", "variants") == (0, 1, 2)
        answer, source = ask(server, system, "Which drawer?")
        assert (cached(answer), source) == (SMALL, "source=system-prompt")
        assert counts(server, "hits", "misses", "hash_changes") == (1, 1, 0)
        ask(server, changed, "Which drawer?")
        assert counts(server, "hits", "misses", "hash_changes", "variants", "evicted_by_space") == (1, 2, 1, 2, 1)
        server.stop()
    assert (cold / SYSTEM_PROMPTS_FOLDER).is_dir()


def test_a_damaged_one_is_set_aside_and_the_answer_is_right(tmp_path: Path, model: Model) -> None:
    system, question, folder = system_of(model, SMALL), "Which drawer holds most keys?", tmp_path / "prompts"
    with server_at(tmp_path) as server:
        twin = said(ask(server, system, question)[0])
    with server_at(tmp_path, *kept(folder), SMALL_ROOT) as server:
        ask(server, system, "Say hello.", max_tokens=4)
        server.stop()
    for victim in folder.glob("seg/*/*.seg"):
        data = bytearray(victim.read_bytes())
        data[5000] ^= 1
        victim.write_bytes(data)
    with server_at(tmp_path, *kept(folder), SMALL_ROOT) as server:
        answer, source = ask(server, system, question)
        assert (cached(answer), source, said(answer)) == (0, "source=none", twin)
        assert counts(server, "hits", "misses", "tokens_saved", "written") == (0, 1, 0, 1)
        assert server.status()["system_prompts"]["level"]["counters"]["quarantined"] == 1
        server.stop()
    assert len(list(folder.glob("seg/*/*.bad"))) == 1


@pytest.fixture(scope="module")
def tiny_paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_tiny_models(tmp_path_factory.mktemp("tiny"), vocabulary_of=find_model("demo"))


@pytest.mark.parametrize("name", ["qwen35", "lfm2_window", "mamba"])
def test_models_whose_memory_cannot_be_cut(tmp_path: Path, tiny_paths: dict[str, Path], name: str) -> None:
    tiny = Model(tiny_paths[name], gpu_layers=None, layer_split=(), progress=lambda done: None)
    system, question, folder = system_of(tiny, SMALL), "Which drawer holds most keys?", tmp_path / "prompts"
    flags = (f"--model={tiny_paths[name]}", SMALL_ROOT)
    with server_at(tmp_path, *flags) as server:
        twin = said(ask(server, system, question)[0])
    with server_at(tmp_path, *flags, *kept(folder)) as server:
        ask(server, system, "Say hello.", max_tokens=4)
        assert counts(server, "misses", "written") == (1, 1)
        server.stop()
    with server_at(tmp_path, *flags, *kept(folder)) as server:
        answer, source = ask(server, system, question)
        assert (cached(answer), source, said(answer)) == (SMALL, "source=system-prompt", twin)
        assert counts(server, "hits", "misses", "tokens_saved") == (1, 0, SMALL)
