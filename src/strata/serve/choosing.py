"""What the engine measured at an earlier start and this one goes on with: which choices apply to these settings.

Where they are kept is `store/choices.py`; without a directory every start measures.
"""

from __future__ import annotations

from pathlib import Path

from strata.config import Config
from strata.engine.protocol import EngineInfo, Remembered
from strata.store.choices import Choices


class ChoicesOf:
    """The choices that were made for a model under these settings. `kept` None: there is no place for them."""

    def __init__(self, config: Config, model: Path, kept: Choices | None) -> None:
        self._kept = kept
        self._model = f"{model.name} {model.stat().st_size} {','.join(config.kv)}"
        self._use = f"{self._model} x{config.parallel} of {config.context or 'auto'}"
        self._flash_is_open = config.flash_attention == "auto"
        self._pool_is_open = config.pool == "auto" and config.pool_cells is None
        self._found = Remembered()

    def remembered(self) -> Remembered:
        """What is kept of the settings that are left open."""
        if self._kept is not None:
            self._found = Remembered(
                flash_attention=self._kept.flash_attention(self._model) if self._flash_is_open else None,
                split_pool=self._kept.split_pool(self._use) if self._pool_is_open else None,
            )
        return self._found

    def keep(self, info: EngineInfo) -> None:
        """Keep what was measured anew."""
        if self._kept is None:
            return
        if self._flash_is_open and self._found.flash_attention is None:
            self._kept.keep_flash_attention(self._model, info.flash_attention)
        if self._pool_is_open and self._found.split_pool is None:
            self._kept.keep_split_pool(self._use, info.pool == "split")
