"""Each private name of another library that zerokl uses stands in the list of docs/support.md."""

import ast
import re
from pathlib import Path

import pytest
from zerokl.verify.run_environment import PACKAGE_ROOT

from tests.test_floors import FLOORS

_PYTHON = {"_asdict", "_replace", "_make", "_fields"}  # NamedTuple's, which Python documents


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defined(tree: ast.AST) -> set[str]:
    """The names that a file defines, or assigns to."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def _used(tree: ast.AST) -> set[str]:
    """The private names that a file reads of an object, imports of a library, or asks for by getattr."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.update(node.module.split("."), (alias.name for alias in node.names))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            names.update(x.value for x in node.args[1:2] if isinstance(x, ast.Constant))
    return {name for name in names if _is_private(name)}


def foreign_names(root: Path) -> set[str]:
    """The private names that are used below `root`, and that no file there defines."""
    trees = [ast.parse(file.read_text()) for floor in FLOORS for file in (root / floor).rglob("*.py")]
    defined = set().union(*map(_defined, trees))
    return set().union(*map(_used, trees)) - defined - _PYTHON


def listed() -> set[str]:
    """The names in the table of docs/support.md."""
    page = (PACKAGE_ROOT / "docs" / "support.md").read_text().partition("## Private interfaces")[2]
    rows = [line.split("|")[2] for line in page.splitlines() if line.startswith("| ")][2:]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_no_private_name_of_a_library_is_used_that_the_list_lacks():
    assert foreign_names(PACKAGE_ROOT) - listed() == set()


def test_what_is_listed_is_used():
    sources = "".join(file.read_text() for floor in FLOORS for file in (PACKAGE_ROOT / floor).rglob("*.py"))
    assert len(listed()) > 15
    assert [name for name in listed() if not re.search(rf"\b{name}\b", sources)] == []


@pytest.mark.parametrize(
    "line", ["torch._dynamo", "getattr(model, '_inner', None)", "import a\nfrom lib._private import x"]
)
def test_control_a_new_private_name_is_found(tmp_path, line):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "new.py").write_text(line)
    assert len(foreign_names(tmp_path) - listed()) == 1
