"""What is measured once stays with every directory of the cache, whichever of them is used later."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from strata.config import Config
from strata.engine.fake_model import fake_info
from strata.engine.protocol import Remembered
from strata.serve.choosing import ChoicesOf
from strata.store.choices import Choices
from strata.store.fs import Disk

INFO = fake_info(slots=1, context=256, stages=1)


@pytest.fixture
def folders(tmp_path: Path) -> list[Choices]:
    (tmp_path / "model").write_bytes(b"x")
    names = ("cold", "warm", "system-prompts")
    for name in names:
        (tmp_path / name).mkdir()
    return [Choices(Disk(), tmp_path / name) for name in names]


def choices(tmp_path: Path, kept: list[Choices], **options: object) -> ChoicesOf:
    config = replace(Config(model="demo"), **options)
    return ChoicesOf(config, tmp_path / "model", kept)


@pytest.mark.parametrize("chosen", [True, False])
def test_each_directory_keeps_what_was_chosen(tmp_path: Path, folders: list[Choices], chosen: bool) -> None:
    info = msgspec.structs.replace(INFO, flash_attention=chosen)
    assert choices(tmp_path, folders).remembered() == Remembered()
    choices(tmp_path, folders[:2]).keep(info)
    assert choices(tmp_path, folders[:1]).remembered().flash_attention is chosen
    assert choices(tmp_path, folders[1:2]).remembered().flash_attention is chosen
    assert choices(tmp_path, folders[2:]).remembered().flash_attention is None
    choices(tmp_path, folders).keep(info)
    assert choices(tmp_path, folders[2:]).remembered().flash_attention is chosen, "what came later learns it too"


def test_what_a_directory_knows_is_not_changed(tmp_path: Path, folders: list[Choices]) -> None:
    yes, no = (msgspec.structs.replace(INFO, flash_attention=on) for on in (True, False))
    choices(tmp_path, folders[1:2]).keep(yes)
    choices(tmp_path, folders[:2]).keep(no)
    assert choices(tmp_path, folders[1:2]).remembered().flash_attention is True
    assert choices(tmp_path, folders).remembered().flash_attention is False, "the first one that knows"


def test_what_the_user_says_is_not_kept(tmp_path: Path, folders: list[Choices]) -> None:
    choices(tmp_path, folders, flash_attention="on").keep(INFO)
    assert choices(tmp_path, folders).remembered() == Remembered()
