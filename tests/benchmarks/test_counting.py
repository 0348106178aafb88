"""The counting task of benchmarks/real: its problems, their answers and rewards."""

import re
from itertools import pairwise

import pytest
from zerokl.benchmarks.real.counting import Counting


def test_a_problem_names_where_to_begin_and_to_end():
    problem = Counting().problems("train")[0]
    first, last = map(int, re.findall(r"\d+", problem.prompt))
    assert (
        problem.prompt == f"Count from {first} to {last}. Write only the numbers, with commas between them."
    )
    assert problem.answer == ", ".join(str(n) for n in range(first, last + 1))
    assert Counting().reward(problem, problem.answer) == 1.0
    assert Counting().reward(problem, "I cannot count.") < 0.5


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_with_steps_every_problem_names_its_own(split):
    task = Counting(train=64, held_out=16, fewest=6, most=12, widest=6)
    steps = set()
    for problem in task.problems(split):
        first, last, step = map(int, re.findall(r"\d+", problem.prompt))
        numbers = [int(word) for word in problem.answer.split(", ")]
        assert (numbers[0], numbers[-1]) == (first, last)
        assert {b - a for a, b in pairwise(numbers)} == {step}
        assert 7 <= len(numbers) <= 13
        steps.add(step)
    assert steps == {1, 2, 3, 4, 5, 6}
