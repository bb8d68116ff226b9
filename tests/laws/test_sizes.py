"""Laws of size: a module can be read in one sitting and introduces itself, a function fits on a screen."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "strata").rglob("*.py"))
MODULE_LINES = 400
FUNCTION_LINES = 60


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_module_is_short_and_introduces_itself(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MODULE_LINES
    assert not text or ast.get_docstring(ast.parse(text)), "a module begins with what it covers and what it does not"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_every_function_is_short(path: Path) -> None:
    functions = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths = {f"{node.name}, line {node.lineno}": (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert {name: length for name, length in lengths.items() if length > FUNCTION_LINES} == {}
