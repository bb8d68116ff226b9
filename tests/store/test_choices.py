"""Choices: kept across processes, and never a reason not to start."""

from __future__ import annotations

import os

import pytest
from tests.store.samples import IDENTITY

from strata.store.choices import Choices
from strata.store.fs import Disk
from strata.store.level import Level
from strata.store.names import CHOICES_NAME


def test_a_choice_is_kept_per_model(tmp_path) -> None:
    choices = Choices(Disk(), tmp_path)
    assert choices.flash_attention("a") is None
    choices.keep_flash_attention("a", True)
    choices.keep_flash_attention("b", False)
    again = Choices(Disk(), tmp_path)
    assert [again.flash_attention(model) for model in "abc"] == [True, False, None]


def test_the_kind_of_pool_is_kept_beside_it(tmp_path) -> None:
    choices = Choices(Disk(), tmp_path)
    choices.keep_flash_attention("a", True)
    assert choices.split_pool("a") is None
    choices.keep_split_pool("a", False)
    choices.keep_split_pool("a x4", True)
    again = Choices(Disk(), tmp_path)
    assert [again.flash_attention("a"), again.split_pool("a"), again.split_pool("a x4")] == [True, False, True]


def test_what_a_killed_process_left_is_overwritten(tmp_path) -> None:
    (tmp_path / (CHOICES_NAME + ".tmp")).write_text("torn")
    choices = Choices(Disk(), tmp_path)
    choices.keep_flash_attention("a", True)
    assert choices.flash_attention("a") is True
    assert [path.name for path in tmp_path.iterdir()] == [CHOICES_NAME]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a": 1}', b"\x80\x04pickle", bytes(2 << 20)])
def test_a_damaged_file_costs_a_measurement_only(tmp_path, content) -> None:
    (tmp_path / CHOICES_NAME).write_bytes(content)
    choices = Choices(Disk(), tmp_path)
    assert choices.flash_attention("a") is None
    choices.keep_flash_attention("a", True)
    assert choices.flash_attention("a") is True


@pytest.mark.parametrize("kind", ["link", "fifo", "dir"])
def test_what_is_no_file_costs_a_measurement_only(tmp_path, kind) -> None:
    path, outside = tmp_path / CHOICES_NAME, tmp_path / "outside"
    outside.write_text('{"a": true}')
    if kind == "link":
        path.symlink_to(outside)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    choices = Choices(Disk(), tmp_path)
    assert choices.flash_attention("a") is None
    choices.keep_flash_attention("a", False)
    assert outside.read_text() == '{"a": true}'


def test_the_scan_does_not_take_it_for_a_strangers_file(tmp_path) -> None:
    level = Level.open(tmp_path)
    Choices(Disk(), tmp_path).keep_flash_attention("a", True)
    assert level.scan(IDENTITY).other == ()
    assert level.used_bytes == level.usage()
    level.close()
