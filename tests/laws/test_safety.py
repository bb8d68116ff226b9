"""Laws of safety: nothing stored is executed, no key depends on the process, no errors outside the one tree."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.laws.test_sizes import ROOT, SOURCES, name_of

from strata.cli.docs import error_classes

FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "diskcache", "torch"}
# hash() differs from process to process, so nothing that outlives one may be named by it.
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "hash"}


def problems(tree: ast.AST) -> list[str]:
    """What a module does that it must not."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [f"import {name.name}" for name in names if name.name.split(".")[0] in FORBIDDEN_MODULES]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in FORBIDDEN_MODULES:
                found.append(f"from {module} import")
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
                found.append(f"{name}() in line {node.lineno}")
            case ast.keyword(arg="allow_pickle"):
                found.append(f"allow_pickle in line {node.lineno}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_nothing_stored_can_be_executed(path: Path) -> None:
    assert problems(ast.parse(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from marshal import loads", "import torch.nn", "eval('1')", "hash(x)", "f(allow_pickle=True)"],
)
def test_the_law_sees_what_it_forbids(code: str) -> None:
    assert len(problems(ast.parse(code))) == 1


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_errors_grow_on_the_one_tree(path: Path) -> None:
    if path == ROOT / "src" / "strata" / "errors.py":
        return
    tree_names = {error.__name__ for error in error_classes()}
    classes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef)]
    assert [node.name for node in classes if {b.id for b in node.bases if isinstance(b, ast.Name)} & tree_names] == []
