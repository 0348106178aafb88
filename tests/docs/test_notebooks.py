"""The notebooks of docs/examples/notebooks as they lie there; tests/notebooks runs them."""

import ast
import json
import re
from pathlib import Path

import pytest
from zerokl.verify.run_environment import PACKAGE_ROOT as ROOT

FOLDER = ROOT / "docs" / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
GALLERY = (ROOT / "docs" / "examples.md").read_text()


def code_cells(notebook: Path) -> list[dict]:
    """The cells with code of a notebook's JSON."""
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


def python_of(source: str) -> str:
    """A cell's code without what IPython alone understands: commands after ! and the lines with %%."""
    return re.sub(r"^%%.*$", "", re.sub(r"^!.*$|(?<= = )!.*$", "None", source, flags=re.M), flags=re.M)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_run_to_its_end_and_is_in_the_gallery(notebook):
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert not [out for cell in cells for out in cell["outputs"] if out["output_type"] == "error"]
    code = "\n".join(python_of("".join(cell["source"])) for cell in cells)
    assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(code))), "nothing in it can fail"
    assert f"examples/notebooks/{notebook.name}" in GALLERY
