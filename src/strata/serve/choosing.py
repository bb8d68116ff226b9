"""What the engine measured at an earlier start and this one goes on with: which choices apply to these settings.

They are kept in every directory of the cache (`store/choices.py`), so that each goes on being readable when it is used
without the others; without a directory every start measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from strata.config import Config
from strata.engine.protocol import EngineInfo, Remembered
from strata.store.choices import Choices


class ChoicesOf:
    """The choices made for a model under these settings. `kept`: of each directory; the first that knows counts."""

    def __init__(self, config: Config, model: Path, kept: Sequence[Choices]) -> None:
        self._kept = tuple(kept)
        self._model = f"{model.name} {model.stat().st_size} {','.join(config.kv)}"
        self._use = f"{self._model} x{config.parallel} of {config.context or 'auto'}"
        self._flash_is_open = config.flash_attention == "auto"
        self._pool_is_open = config.pool == "auto" and config.pool_cells is None

    def remembered(self) -> Remembered:
        """What is kept of the settings that are left open."""
        flash = _first(kept.flash_attention(self._model) for kept in self._kept) if self._flash_is_open else None
        split = _first(kept.split_pool(self._use) for kept in self._kept) if self._pool_is_open else None
        return Remembered(flash_attention=flash, split_pool=split)

    def keep(self, info: EngineInfo) -> None:
        """Keep what was chosen wherever it is not known yet."""
        for kept in self._kept:
            if self._flash_is_open and kept.flash_attention(self._model) is None:
                kept.keep_flash_attention(self._model, info.flash_attention)
            if self._pool_is_open and kept.split_pool(self._use) is None:
                kept.keep_split_pool(self._use, info.pool == "split")


def _first(found: Iterable[bool | None]) -> bool | None:
    return next((choice for choice in found if choice is not None), None)
