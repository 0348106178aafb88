"""A variable's name says what it holds, a file's name one thing, and a docstring more than where to look."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from zerokl.verify.run_environment import PACKAGE_ROOT

from tests.test_floors import FLOORS

_FOLDERS = (*FLOORS, "benchmarks", "docs", "tests", "wheels")
_DOCUMENTED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_EMPTY = {"own", "said", "found", "every", "theirs", "of", "at", "some"}
# file: name -> why users see it.
_ALLOWED = {
    "cli/audits.py: every": "the option --every",
    "engine/config/training_sections.py: every": "the keys evaluation.every and checkpoint.every",
    "engine/runs/ablations/hypotheses.py: of": "the key `of` of a hypothesis in a grid file",
}


def empty_words(root: Path) -> set[str]:
    """`file: name` of every variable and parameter that says nothing, and of each docstring "See X."."""
    files = [*root.glob("*.py"), *(file for folder in _FOLDERS for file in (root / folder).rglob("*.py"))]
    return {
        f"{file.relative_to(root)}: {word}"
        for file in files
        for word in _empty_words(ast.parse(file.read_text()))
    }


def _empty_words(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and _is_empty(node.id):
            yield node.id
        elif isinstance(node, ast.arg) and _is_empty(node.arg):
            yield node.arg
        elif isinstance(node, _DOCUMENTED) and (ast.get_docstring(node) or "").startswith("See "):
            yield f"the docstring of {node.name}"


def _is_empty(name: str) -> bool:
    bare = name.lstrip("_")
    return bare in _EMPTY or bare.startswith("of_")


def test_every_name_and_docstring_says_something():
    assert empty_words(PACKAGE_ROOT) == set(_ALLOWED)


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("own = 1", "own"),
        ("for i, _of_rank in x: pass", "_of_rank"),
        ("y = [every for every in x]", "every"),
        ("if found := f(): pass", "found"),
        ("def f(*, of): pass", "of"),
        ("g = lambda theirs: 0", "theirs"),
        ("class A:\n    at: int", "at"),
        ('def f():\n    """See X."""', "the docstring of f"),
        ('class A:\n    """See X.\n\n    More.\n    """', "the docstring of A"),
        ('async def f():\n    """See a.b for all."""', "the docstring of f"),
    ],
)
def test_control_an_empty_word_is_found(tmp_path, code, word):
    (tmp_path / _FOLDERS[0]).mkdir()
    (tmp_path / _FOLDERS[0] / "wrong.py").write_text(
        f'owner = x.own = 1\ndef of_x():\n    """Do f. See X."""\n{code}\n'
    )
    assert empty_words(tmp_path) == {f"{_FOLDERS[0]}/wrong.py: {word}"}


# Words that name files of several places, and one thing in all of them: an operation or a block, another
# project or an engine, a kind of fault beside what predicts it, the page and its charts, a configuration.
_SHARED = {
    *("attention", "draw", "embedding", "experts", "logprob", "norm", "residual", "rope", "weights"),
    *("engine", "hf", "openrlhf", "skyrl", "trl", "verl"),
    *("adapters", "generation_config", "penalties"),
    *("charts", "page"),
    *("columns", "config", "config_file", "installed"),
}


def shared_words(root: Path) -> set[str]:
    """The names that files of several places have."""
    names = Counter(file.stem for folder in FLOORS for file in (root / folder).rglob("*.py"))
    return {name for name, n in names.items() if n > 1 and name != "__init__"}


def test_no_word_names_two_things():
    assert shared_words(PACKAGE_ROOT) == _SHARED


def test_control_a_word_of_two_places_is_found(tmp_path):
    for folder in FLOORS[:2]:
        (tmp_path / folder).mkdir()
        for name in ("__init__", "recorder", folder):
            (tmp_path / folder / f"{name}.py").touch()
    assert shared_words(tmp_path) == {"recorder"}
