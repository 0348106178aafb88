"""The drawings of docs/tour.md: imports lead from each file to those that stand below it."""

import re
from functools import cache

import pytest
from zerokl.verify.run_environment import PACKAGE_ROOT

from tests.test_floors import import_graph

MOST_FILES = 15
# Packages that import each file of their folder, whatever its name.
LISTED = ("model.families", "audit.frameworks")


def drawings(text: str) -> list[list[tuple[int, str]]]:
    """The drawings of a page: for each line its indentation and its file."""
    blocks = re.findall(r"^```text\n(.*?)^```", text, re.S | re.M)
    line = re.compile(r"^( *).*\s{2,}(\S+\.py)$", re.M)
    return [[(len(indent), file) for indent, file in line.findall(block)] for block in blocks]


def steps(drawing: list[tuple[int, str]]) -> list[tuple[str, str]]:
    """Each file of a drawing beside the one that it stands below."""
    above: dict[int, str] = {}
    pairs = []
    for depth, file in drawing:
        above = {d: f for d, f in above.items() if d < depth}
        if above:
            pairs.append((above[max(above)], file))
        above[depth] = file
    return pairs


def reached_from(name: str, graph: dict[str, set[str]]) -> set[str]:
    waiting, seen = [name], set()
    while waiting:
        for other in graph[waiting.pop()] - seen:
            seen.add(other)
            waiting.append(other)
    return seen


@cache
def source_graph() -> dict[str, set[str]]:
    """The imports of the source, those of LISTED by their place."""
    graph = import_graph(PACKAGE_ROOT)
    for package in LISTED:
        graph[package] = graph[package] | {name for name in graph if name.startswith(f"{package}.")}
    return graph


def not_below(drawing: list[tuple[int, str]]) -> list[tuple[str, str]]:
    """The steps that no imports take."""
    graph = source_graph()
    names = [tuple(file.removesuffix(".py").replace("/", ".") for file in step) for step in steps(drawing)]
    return [(caller, called) for caller, called in names if called not in reached_from(caller, graph)]


WALKS = drawings((PACKAGE_ROOT / "docs" / "tour.md").read_text())


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk[0][1])
def test_a_walk_is_short_and_never_goes_up(walk):
    files = [file for _, file in walk]
    assert len(set(files)) == len(files) <= MOST_FILES
    assert [file for file in files if not (PACKAGE_ROOT / file).is_file()] == []
    assert not_below(walk) == []


def test_there_are_three_walks():
    assert [walk[0][1] for walk in WALKS] == ["cli/runs.py", "engine/train/step.py", "cli/audits.py"]


def test_control_a_step_back_up_is_found():
    walk = [(0, "kernels/linear.py"), (2, "model/decoder.py")]
    assert not_below(walk) == [("kernels.linear", "model.decoder")]
