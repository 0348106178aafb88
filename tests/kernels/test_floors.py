"""The house: `kernels` is importable by itself, and each floor imports only floors below it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import zerokl

ROOT = Path(zerokl.__file__).parent
BELOW = {
    "kernels": {"kernels"},
    "verify": {"verify"},
    "model": {"model", "kernels", "verify"},
    "engine": {"engine", "model", "kernels", "verify"},
}


def imported_floors(file: Path) -> set[str]:
    """The folders and modules directly under the root that `file` imports from, anywhere in it."""
    package = ("zerokl", *file.relative_to(ROOT).parent.parts)
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            names += [[*base, alias.name] for alias in node.names]
    return {name[1] for name in names if name[0] == "zerokl" and len(name) > 1}


@pytest.mark.parametrize("floor", BELOW)
def test_floor_imports_only_downwards(floor):
    files = sorted((ROOT / floor).rglob("*.py"))
    assert len(files) > 1
    for file in files:
        assert imported_floors(file) <= BELOW[floor], file


def test_control_an_import_upwards_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "kernels").mkdir()
    file = tmp_path / "kernels" / "wrong.py"
    for line in (
        "from ..engine.loss import x",
        "from .. import engine",
        "import zerokl.engine",
        "def f():\n    from zerokl.engine import x",
    ):
        file.write_text(line)
        assert imported_floors(file) == {"engine"}


def test_kernels_init_is_only_a_docstring():
    body = ast.parse((ROOT / "kernels" / "__init__.py").read_text()).body
    assert len(body) == 1
    assert isinstance(body[0].value, ast.Constant)


def test_kernels_is_importable_by_itself_from_the_repository_root():
    """transformers looks for a package called `kernels`, and finds ours when Python runs from the root."""
    code = "import sys, kernels, zerokl.kernels; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    subprocess.run([sys.executable, "-c", "import kernels; from transformers import Qwen3ForCausalLM"], cwd=ROOT, check=True)
