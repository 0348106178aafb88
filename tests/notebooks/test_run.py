"""The notebooks of docs/examples/notebooks run to their ends, and a cell that fails is seen."""

import os
import sys
from pathlib import Path

import pytest
from zerokl.verify.run_environment import PACKAGE_ROOT as ROOT

pytestmark = pytest.mark.notebooks

FOLDER = ROOT / "docs" / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture(autouse=True)
def _commands_of_this_environment(monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def run(notebook) -> None:
    """Run a notebook in the folder of the notebooks. Raises CellExecutionError."""
    import nbclient

    resources = {"metadata": {"path": str(FOLDER)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path):
    import nbformat

    run(nbformat.read(path, 4))


def test_control_a_cell_that_fails_is_seen():
    import nbformat
    from nbclient.exceptions import CellExecutionError

    notebook = nbformat.read(FOLDER / "trl-log.ipynb", 4)
    notebook.cells[-1].source = notebook.cells[-1].source.replace("off by one", "another checkpoint")
    with pytest.raises(CellExecutionError, match="AssertionError"):
        run(notebook)
