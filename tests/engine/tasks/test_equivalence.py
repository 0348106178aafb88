"""Classes of completions: by equal text, and by a function of the user's in processes of its own."""

import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import permutations

import pytest
from zerokl.engine.config.run_config import TaskConfig
from zerokl.engine.tasks.base import Problem
from zerokl.engine.tasks.equivalence import open_equivalence

from tests.helpers import importable

MODULE = """
import os

value = 5


def same_remainder(a, b):
    return int(a) % 3 == int(b) % 3


async def near(a, b):
    return abs(int(a) - int(b)) <= 1


def raises(a, b):
    raise KeyError("missing")


def number(a, b):
    return 1


def exits(a, b):
    os._exit(3)


def sleeps(a, b):
    while True:
        pass


def writes(a, b):
    for fd in range(3, 64):
        try:
            os.write(fd, (14).to_bytes(8, "big") + b'{"value": [0]}')
        except OSError:
            pass
    return True
"""
PROBLEMS = [Problem(7, "1=", "1"), Problem(8, "2=", "2")]


@pytest.fixture(scope="module", autouse=True)
def _module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with importable(tmp_path_factory.mktemp("meanings"), "meanings", MODULE):
        yield


def classes(name: str, *groups: list[str], **settings: object) -> list[list[int]]:
    settings = TaskConfig(**{"reward_processes": 1, **settings}).reward_settings
    with open_equivalence(name and f"meanings:{name}", settings) as equivalence:
        return equivalence.classes(PROBLEMS, groups)


def partition(numbers: list[int]) -> set[frozenset[int]]:
    """The places that have one class each."""
    return {frozenset(i for i, c in enumerate(numbers) if c == d) for d in numbers}


def test_without_a_function_texts_are_equal_after_strip():
    one, two = classes("", [" 7", "8", "7\n", "7 7", "8 "], ["", "  "])
    assert partition(one) == {frozenset({0, 2}), frozenset({1, 4}), frozenset({3})}
    assert partition(two) == {frozenset({0, 1})}


@pytest.mark.parametrize("processes", [1, 2])
def test_the_classes_of_an_equivalence_are_its_own(processes):
    groups = ["4", "30", "7", "2", "0", "4"], ["1"]
    one, two = classes("same_remainder", *groups, reward_processes=processes)
    assert partition(one) == {frozenset({0, 2, 5}), frozenset({1, 4}), frozenset({3})}
    assert partition(two) == {frozenset({0})}


def test_the_order_of_the_texts_does_not_move_one_to_another_class():
    """near() is no equivalence: 1 is near 2, and 2 near 3. The classes follow from the texts all the same."""
    settings = TaskConfig(reward_processes=1).reward_settings
    orders = list(permutations(["1", "2", "3", "4"]))
    with open_equivalence("meanings:near", settings) as equivalence:
        classes_of_orders = equivalence.classes(PROBLEMS[:1] * len(orders), orders)
    for order, numbers in zip(orders, classes_of_orders, strict=True):
        together = {frozenset(order[i] for i in places) for places in partition(numbers)}
        assert together == {frozenset("12"), frozenset("34")}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "raised KeyError ('missing')"),
        ("number", "raised TypeError (its value is of the type int; it must be True or False)"),
        ("exits", "its process ended with exit code 3"),
        ("sleeps", "took more than 1 s (task.reward_timeout_s)"),
    ],
)
def test_a_function_that_fails_is_one_line_that_names_the_problem(capfd, name, reason):
    with pytest.raises(ValueError, match=re.escape(f"equivalence: {reason} for prompt 8 ('2=')")) as caught:
        classes(name, ["5", "5"], ["5", "6"], reward_timeout_s=1.0)
    assert len(str(caught.value).splitlines()) == 1
    assert ("meanings.py line 16" in str(caught.value)) == (name == "raises")
    assert capfd.readouterr().err == ""


def test_what_the_function_writes_to_the_run_is_no_class():
    # The second answer, which is the function's value, may come with the first one or after it.
    reason = r"(answered \[0\]|wrote into the connection of its process to the run)"
    with pytest.raises(ValueError, match=rf"equivalence: {reason} for prompt 8"):
        classes("writes", ["5"], ["5", "6"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "meanings:nowhere cannot be imported as module:object; it raised AttributeError"),
        ("value", "meanings:value is a int; it must be a function"),
    ],
)
def test_a_function_that_is_none_is_refused_before_the_run(name, message):
    with pytest.raises(ValueError, match=f"^equivalence: {message}"):
        classes(name, ["1"])


def test_its_process_starts_without_torch_and_numpy():
    code = "import zerokl.engine.tasks.equivalence_function, sys; "
    code += "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
