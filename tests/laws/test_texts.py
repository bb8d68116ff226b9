"""Laws of the written: pages about flags and errors are current, no task without an owner, no path of one machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.laws.test_sizes import ROOT, name_of

from strata.cli.docs import error_classes, errors_markdown, flags_markdown
from strata.config import SETTINGS, env_name

TEXTS = sorted(
    path
    for folder in ("src/strata", "tests", "benchmarks", "docs", ".ci")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".md", ".awk", ".json", ""} and path.is_file() and path != Path(__file__)
) + [ROOT / name for name in ("Makefile", "README.md", "ARCHITECTURE.md", "CHANGELOG.md", "pyproject.toml")]

TASK = re.compile(r"\b(?:TODO|FIXME|XXX)\b(?!\([\w-]+\))")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home|Users)/\w|[A-Z]:\\\\?Users")


def test_the_pages_about_flags_and_errors_are_current() -> None:
    assert (ROOT / "docs" / "flags.md").read_text(encoding="utf-8") == flags_markdown(), "run: make docs"
    assert (ROOT / "docs" / "errors.md").read_text(encoding="utf-8") == errors_markdown(), "run: make docs"


def test_the_pages_name_everything() -> None:
    flags, errors = flags_markdown(), errors_markdown()
    assert all(f"`--{name}`" in flags and f"`{env_name(name)}`" in flags for s in SETTINGS for name in s.names)
    assert all(f"`{error.__name__}`" in errors and (error.__doc__ or "").strip() for error in error_classes())


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_a_task_has_an_owner_and_no_path_is_of_one_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert TASK.findall(text) == []
    assert MACHINE_PATH.findall(text) == []


@pytest.mark.parametrize(
    ("text", "is_task", "is_path"),
    [
        ("# TODO: later", True, False),
        ("# TODO(anna): later", False, False),
        ("open('/work/main')", False, True),
        ("see /home/anna/x", False, True),
        ("C:\\Users\\anna", False, True),
        ("https://example.com/home/x", False, False),
    ],
)
def test_the_law_sees_what_it_forbids(text: str, is_task: bool, is_path: bool) -> None:
    assert bool(TASK.search(text)) is is_task
    assert bool(MACHINE_PATH.search(text)) is is_path
