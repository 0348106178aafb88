"""Each floor, and each room of engine/, imports only what lies below it, and no files import each other."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from zerokl.verify.run_environment import PACKAGE_ROOT

# From the top: a place may import itself and the places after it.
PLACES = (
    "cli",
    "integrations",
    "audit",
    "engine.runs.report",
    "engine.runs.ablations",
    "engine.runs.checks",
    "engine.runs",
    "engine.train",
    "engine.train.parallel",
    "engine.train.losses",
    "engine.rollout",
    "engine.config",
    "engine.tasks",
    "engine.display",
    "engine.processes",
    "model",
    "kernels",
    "verify",
    "pages",
    "files",
)
FLOORS = ("cli", "integrations", "audit", "engine", "model", "kernels", "verify", "pages", "files")
# Places below that a place does not know. Floor 1 has three places, and none imports another. The audit
# compares engines; it knows nothing of training.
STRANGERS = {
    "kernels": {"verify", "pages"},
    "verify": {"kernels", "pages"},
    "audit": {
        "engine.train",
        "engine.train.parallel",
        "engine.train.losses",
        "engine.runs.report",
        "engine.runs.ablations",
        "engine.runs.checks",
    },
}


def place_of(module: str) -> str:
    """The place of a module below zerokl, such as engine.train.step: the longest name that fits.

    "" for the root, and for a module that is in no place.
    """
    return max((place for place in PLACES if f"{module}.".startswith(f"{place}.")), key=len, default="")


@cache
def imported(file: Path, root: Path) -> set[str]:
    """The names below zerokl that `file` imports, in any line of it."""
    package = ("zerokl", *file.relative_to(root).parent.parts)
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            names += [".".join([*base, alias.name]) for alias in node.names]
    return {name.removeprefix("zerokl.") for name in names if name.startswith("zerokl.")}


def upward_imports(root: Path) -> list[str]:
    """The imports that do not go down, or that reach what a place may not know, one line each."""
    lines = []
    for file in sorted(f for floor in FLOORS for f in (root / floor).rglob("*.py")):
        place = place_of(".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"))
        if not place:
            continue
        allowed = set(PLACES[PLACES.index(place) :]) - STRANGERS.get(place, set())
        lines += [
            f"{file.relative_to(root)}: {name}"
            for name in imported(file, root)
            if place_of(name) not in allowed
        ]
    return lines


def import_graph(root: Path) -> dict[str, set[str]]:
    """The modules of all floors, and for each those that it imports, in any line."""
    files = {
        ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file
        for floor in FLOORS
        for file in (root / floor).rglob("*.py")
    }

    def module_of(name: str) -> str:
        while name and name not in files:
            name = name.rpartition(".")[0]
        return name

    return {name: {module_of(i) for i in imported(file, root)} - {name, ""} for name, file in files.items()}


def circle_of(root: Path) -> list[str]:
    """The modules of one circle of imports; empty where there is none."""
    try:
        TopologicalSorter(import_graph(root)).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def reached(root: Path, place: str) -> set[str]:
    """The modules that a place imports, also through others."""
    graph = import_graph(root)
    waiting, seen = [name for name in graph if name.split(".")[0] == place], set()
    while waiting:
        if (name := waiting.pop()) not in seen:
            seen.add(name)
            waiting += graph[name]
    return seen


def test_an_audit_reaches_no_training_not_even_through_others():
    modules = reached(PACKAGE_ROOT, "audit")
    assert {"verify.mismatch", "model.decoder", "engine.rollout.types"} <= modules
    assert [name for name in modules if name.startswith(("engine.train", "engine.runs"))] == []


def test_control_a_training_that_an_audit_reaches_through_another_is_found(tmp_path):
    for name, line in (("audit", "from ..engine.policy import x"), ("engine", "from .train.step import y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "policy.py").write_text(line)
    (tmp_path / "engine" / "train").mkdir()
    (tmp_path / "engine" / "train" / "step.py").write_text("")
    assert "engine.train.step" in reached(tmp_path, "audit")


def test_no_files_import_each_other():
    assert circle_of(PACKAGE_ROOT) == []


@pytest.mark.parametrize("back", ["from .a import x", "def f():\n    from . import a"])
def test_control_a_circle_of_three_files_is_found(tmp_path, back):
    (tmp_path / "kernels").mkdir()
    for name, line in (("a", "from .b import y"), ("b", "from .c import z"), ("c", back)):
        (tmp_path / "kernels" / f"{name}.py").write_text(line)
    assert set(circle_of(tmp_path)) == {"kernels.a", "kernels.b", "kernels.c"}


def test_every_file_has_a_place():
    files = [f for floor in FLOORS for f in (PACKAGE_ROOT / floor).rglob("*.py")]
    assert len(files) > 90
    empty = {"engine/__init__.py"}
    for file in files:
        name = str(file.relative_to(PACKAGE_ROOT))
        module = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        assert name in empty or place_of(module), name


def test_nothing_imports_upward():
    assert upward_imports(PACKAGE_ROOT) == []


@pytest.mark.parametrize(
    "line",
    [
        "from ..engine.train import x",
        "import zerokl.engine.train.losses.dpo",
        "def f():\n    from zerokl.engine.train import x",
        "from ..verify import trace",
    ],
)
def test_control_an_import_upward_is_found(tmp_path, line):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "wrong.py").write_text(line)
    assert len(upward_imports(tmp_path)) == 1


def test_control_an_audit_that_knows_the_training_is_found(tmp_path):
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit" / "wrong.py").write_text(
        "from ..engine.train.step import train_step\nfrom ..engine.rollout.types import Rollout"
    )
    assert upward_imports(tmp_path) == ["audit/wrong.py: engine.train.step.train_step"]


def test_control_an_import_of_a_room_above_is_found(tmp_path):
    (tmp_path / "engine" / "train").mkdir(parents=True)
    (tmp_path / "engine" / "train" / "wrong.py").write_text(
        "from ..runs.run import train\nfrom ..rollout.types import Rollout"
    )
    assert upward_imports(tmp_path) == ["engine/train/wrong.py: engine.runs.run.train"]


def test_kernels_init_is_only_a_docstring():
    body = ast.parse((PACKAGE_ROOT / "kernels" / "__init__.py").read_text()).body
    assert len(body) == 1
    assert isinstance(body[0].value, ast.Constant)


@pytest.mark.full
def test_kernels_is_importable_by_itself():
    """transformers looks for a package called `kernels`. It finds ours when Python runs from the root."""
    code = "import sys, kernels, zerokl.kernels; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=PACKAGE_ROOT, check=True)
    code = "import kernels; from transformers import Qwen3ForCausalLM"
    subprocess.run([sys.executable, "-c", code], cwd=PACKAGE_ROOT, check=True)
