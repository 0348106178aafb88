"""Objects of a run are whole when they are made: nothing of another object is assigned afterwards."""

import ast
from pathlib import Path

import pytest
from zerokl.verify.run_environment import PACKAGE_ROOT

_ROOMS = ("engine/train", "engine/train/parallel", "engine/runs", "engine/runs/checks")
# file: what it assigns -> why that completes no object.
_ALLOWED = {
    "engine/train/step.py: state.step": "a step counts itself",
    "engine/train/step.py: state.version": "a step counts its updates",
    "engine/runs/trainer_state.py: state.step": "the counters of a state that goes on elsewhere",
    "engine/runs/trainer_state.py: state.version": "the counters of a state that goes on elsewhere",
    "engine/runs/run.py: console.quiet": "the process's terminal: only rank 0 prints from now on",
}


def assigned_outside(root: Path) -> list[str]:
    """`file: object.attribute` of every assignment to an attribute of something else than self."""
    return [
        f"{file.relative_to(root)}: {attribute}"
        for room in _ROOMS
        for file in sorted((root / room).glob("*.py"))
        for attribute in _assigned(ast.parse(file.read_text()))
    ]


def _assigned(tree: ast.AST) -> list[str]:
    """The attributes of others that are stored or deleted, or named in a call of setattr."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                names.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("setattr", "__setattr__")):
            names.append(ast.unparse(node))
        elif isinstance(node, ast.Global):
            names += [f"global {name}" for name in node.names]
    return names


def test_nothing_is_completed_after_it_is_made():
    assert set(assigned_outside(PACKAGE_ROOT)) == set(_ALLOWED)


@pytest.mark.parametrize(
    ("line", "assignment"),
    [
        ("state.recorder = recorder", "state.recorder"),
        ("a, state.recorder = 1, recorder", "state.recorder"),
        ("self.folder.trackers: int = 1", "self.folder.trackers"),
        ("workers.host.count += 1", "workers.host.count"),
        ("for state.step in (1, 2): pass", "state.step"),
        ("del state.recorder", "state.recorder"),
        ("setattr(state, name, 1)", "setattr(state, name, 1)"),
        ("object.__setattr__(state, name, 1)", "object.__setattr__(state, name, 1)"),
        ("def f():\n    global _prepared", "global _prepared"),
    ],
)
def test_control_a_late_assignment_is_found(tmp_path, line, assignment):
    room = tmp_path / "engine" / "runs"
    room.mkdir(parents=True)
    (room / "wrong.py").write_text(f"class A:\n    def __init__(self):\n        self.a = 1\n{line}\n")
    assert assigned_outside(tmp_path) == [f"engine/runs/wrong.py: {assignment}"]
