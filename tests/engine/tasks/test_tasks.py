"""Tasks: problems are reproducible, splits are disjoint, right answers earn 1 and near misses 0."""

import json
import math
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zerokl.engine.config.run_config import TaskConfig
from zerokl.engine.tasks.answers import NAMED_REWARDS
from zerokl.engine.tasks.base import Problem
from zerokl.engine.tasks.loading import TASKS, load_task
from zerokl.engine.tasks.rewards import Reward, open_reward

# The tasks that generate their problems.
GENERATED = ["add", "sort", "sums", "countdown"]
# Those whose reward is 1 or 0.
BINARY = ["add", "sort", "countdown"]


@pytest.mark.parametrize("name", GENERATED)
def test_splits_are_disjoint_of_the_size_asked_for_and_without_duplicates(name):
    task = load_task(name, {"train": 300, "held_out": 100})
    train, held_out = task.problems("train"), task.problems("held_out")
    assert (len(train), len(held_out)) == (300, 100)
    assert len({p.prompt for p in [*train, *held_out]}) == 400
    assert [p.id for p in train] == list(range(300))


@pytest.mark.parametrize("name", GENERATED)
def test_problems_are_a_function_of_the_seed(name):
    first, again, other_seed = (load_task(name, {"seed": seed}).problems("train") for seed in (3, 3, 4))
    assert first == again != other_seed


@pytest.mark.parametrize("name", BINARY)
def test_every_answer_earns_one_and_near_misses_nothing(name):
    task = load_task(name, {})
    for p in task.problems("train"):
        assert task.reward(p, p.answer) == 1.0
        for miss in ("", p.answer + "0", p.answer[:-1], "0" + p.answer, p.answer + p.answer, p.prompt):
            assert task.reward(p, miss) == 0.0, (p, miss)


@pytest.mark.parametrize("name", BINARY)
@given(completion=st.one_of(st.text(), st.text("0123456789+-*/()., =>", max_size=120)))
def test_any_completion_has_a_reward_of_zero_or_one(name, completion):
    task = load_task(name, {"train": 8, "held_out": 0})
    assert task.reward(task.problems("train")[0], completion) in (0.0, 1.0)


@given(a=st.integers(0, 99), b=st.integers(0, 99), guess=st.integers(0, 200))
def test_add_rewards_the_sum_only(a, b, guess):
    task = load_task("add", {"train": 1, "held_out": 0})
    assert task.reward(Problem(0, f"{a}+{b}=", str(a + b)), str(guess)) == float(guess == a + b)


def test_add_covers_every_pair_once():
    task = load_task("add", {"max_value": 9, "train": 60, "held_out": 40})
    prompts = {p.prompt for s in ("train", "held_out") for p in task.problems(s)}
    assert prompts == {f"{a}+{b}=" for a in range(10) for b in range(10)}


@pytest.mark.parametrize("expression", ["3*2+7", "7+2*3", "7+(3*2)", "(2*(3))+7", "7 + 3 * 2", "7+3/(1/2)"])
def test_countdown_accepts_any_expression_of_the_right_value(expression):
    numbers = "1,2,3,7" if "1" in expression else "2,3,7"
    assert load_task("countdown", {}).reward(Problem(0, f"{numbers}:13=", ""), expression) == 1.0


@pytest.mark.parametrize(
    "expression",
    [
        # Other numbers.
        "13",
        "6+7",
        "3*2+7+0",
        "3+3+7",
        "2*3+7*1",
        "3*2+7=13",
        "32-12-7",
        "7+2*3+3-3",
        # Other values.
        "3*7-2",
        "2+3+7",
        "7-2*3",
        "3/(7-7)",
        "7/0",
        # No expression, or more than an expression of numbers.
        "(3*2+7",
        "3*2+7)",
        "3**2+7",
        "2**3+7",
        "9**9**9**9",
        "7<<3",
        "3 if 2 else 7",
        "13if 3*2*7 else 0",
        "__import__('os')",
        "print(3*2+7)",
        "[3*2+7]",
        "(lambda: 13)()",
        "'3*2+7'",
        "3.0*2+7",
        "3j*2+7",
        "7+3*2,",
        "7;3*2",
        "True*3*2+7",
        "0x3*2+7",
        "0b11*2+7",
        "3*2+0o7",
        "3*2+7#",
        "3*2+7 # thirteen",
        "３*2+7",
        "(" * 60 + "7" + ")" * 60,
    ],
)
def test_countdown_refuses_wrong_numbers_wrong_values_and_code(expression):
    assert load_task("countdown", {}).reward(Problem(0, "2,3,7:13=", "3*2+7"), expression) == 0.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("addd", {}, "addd is not known; choose add, sort, sums, countdown, jsonl"),
        ("add", {"max": 9}, "option max is not known; choose max_value"),
        (
            "add",
            {"max_value": 9, "train": 101, "held_out": 0},
            "has 100 problems, fewer than train \\+ held_out \\(101 \\+ 0\\)",
        ),
        ("add", {"max_value": 0}, "max_value \\(0\\)"),
        ("add", {"train": 0}, "train \\(0\\) must be at least 1"),
        ("sort", {"min_digits": 4, "max_digits": 3}, "min_digits \\(4\\)"),
        ("countdown", {"numbers": 1}, "numbers \\(1\\)"),
        ("jsonl", {}, "needs a file"),
        ("no_such_module:Task", {}, "no_such_module:Task cannot be imported"),
        ("toy:Missing", {}, "toy:Missing cannot be imported"),
        ("builtins:dict", {}, "must make an object with `chat`"),
        ("math:pi", {}, "math:pi"),
    ],
)
def test_a_bad_task_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        load_task(name, options)


def test_a_task_of_the_users_own_is_named_as_module_object():
    task = load_task("toy:Digits", {"n": 3})
    assert [p.prompt for p in task.problems("train")] == ["0=", "1=", "2="]
    problem = task.problems("train")[2]
    for name, completion, expected in (("", "2", 1.0), ("toy:letters", "ab", 0.25)):
        settings = TaskConfig(name="toy:Digits", options={"n": 3}, reward=name).reward_settings
        with open_reward(task, settings) as reward:
            assert reward.values([problem], [[completion]]).tolist() == [[expected]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_by_prompt_and_sample(bad):
    problems = [Problem(7, "1+1=", "2"), Problem(8, "1+2=", "3")]
    message = r"reward: is -?(nan|inf) for prompt 8 \('1\+2='\), sample 1 \('x'\)"
    with pytest.raises(ValueError, match=message):
        _graded(lambda p, text: bad if (p.id, text) == (8, "x") else 1.0).values(
            problems, [["a", "b"], ["c", "x"]]
        )


def _graded(function) -> Reward:
    return Reward(function)


@contextmanager
def _opened(task: str, **settings: object):
    config = TaskConfig(name=task, reward_processes=1, **settings)
    with open_reward(load_task(task, config.options), config.reward_settings) as reward:
        yield reward


def test_every_task_of_the_table_is_tested_here():
    """Those with an environment are in test_environments.py, and pairs are in test_pairs.py."""
    one_turn = {name for name, task in TASKS.items() if not hasattr(task, "environment")}
    assert {*GENERATED, "jsonl", "pairs"} == one_turn


def test_sums_reward_the_share_of_right_places():
    task = load_task("sums", {"digits": 4, "train": 50, "held_out": 0})
    for p in task.problems("train"):
        total, expected = 0, ""
        for digit in p.prompt[:-1]:
            total += int(digit)
            expected += str(total)[-1]
        assert (p.prompt[-1], p.answer) == ("=", expected)
        wrong = expected[:2] + str((int(expected[2]) + 1) % 10) + expected[3]
        earned = {expected: 1.0, wrong: 0.75, expected[:3]: 0.75, expected + "0": 0.8, "": 0.0}
        assert {text: task.reward(p, text) for text in earned} == earned


@pytest.mark.parametrize(
    ("name", "answer", "right", "wrong"),
    [
        ("exact", "Paris", ["Paris", " Paris\n"], ["paris", "It is Paris", ""]),
        (
            "numeric",
            "1,200",
            ["1200", "1 + 1199 = 1,200.", "$1200.00", "#### 1200"],
            ["120", "1200 or 7", ""],
        ),
        ("numeric", "-3", ["it is -3", "\u22123"], ["3", "10-3", "- 3"]),
        ("numeric", "3/4", ["0.75", ".75", "6/8"], ["3", "4", "3/0", "3 / 4"]),
        ("numeric", "75\\%", ["75%"], ["0.75", "x"]),
        ("math", "\\frac{1}{2}", ["\\boxed{0.5}"], ["\\boxed{2}"]),
    ],
)
def test_a_reward_by_name_compares_as_it_says(name, answer, right, wrong):
    problem = Problem(0, "q", answer)
    with _opened("add", reward=name) as reward:
        assert reward.binary
        reward.check_answers([problem])
        assert reward.values([problem], [right]).tolist() == [[1.0] * len(right)]
        assert reward.values([problem], [wrong]).tolist() == [[0.0] * len(wrong)]


@given(completion=st.one_of(st.text(), st.text("0123456789.,/-$% ")), answer=st.integers(-9999, 9999))
def test_any_completion_has_a_numeric_reward(completion, answer):
    reward, problem = NAMED_REWARDS["numeric"], Problem(0, "q", f"{answer:,}")
    assert reward(problem, completion) in (0.0, 1.0)
    assert reward(problem, f"{completion} = {answer}") == 1.0


@pytest.mark.parametrize(
    ("name", "answer", "message"),
    [
        ("numeric", "#### 42", r"'#### 42' of problem 5 is no number; name .* task\.options\.answer_after"),
        ("numeric", "1/0", "is no number"),
        ("math", "9^{9^{9^9}}", "of problem 5 would take too long to compute"),
        ("", "9^{9^{9^9}}", "of problem 5 would take too long to compute"),
    ],
)
def test_an_answer_that_the_reward_cannot_read_is_found_at_the_start(tmp_path, name, answer, message):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "1+1", "answer": "2"}))
    options = {"file": str(tmp_path / "a.jsonl")}
    with _opened("jsonl", options=options, reward=name) as reward, pytest.raises(ValueError, match=message):
        reward.check_answers([Problem(4, "q", "1"), Problem(5, "q", answer)])


def test_a_check_of_the_users_refuses_in_its_own_words():
    problems = [Problem(4, "q", "1"), Problem(5, "q", "odd"), Problem(6, "q", "")]
    with _opened("add", reward="toy:strict") as reward:
        reward.check_answers(problems[:1])
        with pytest.raises(ValueError, match=r"^odd is no answer$"):
            reward.check_answers(problems[:2])
        with pytest.raises(ValueError, match=r"reward: its check raised IndexError .* for problem 6 \(''\)"):
            reward.check_answers(problems[2:])


def test_a_reward_says_whether_its_mean_is_an_accuracy():
    tasks = ("toy:Digits", "toy:letters"), ("toy:Digits", ""), *((name, "") for name in GENERATED)
    for task, reward_name in tasks:
        with _opened("toy:Digits" if ":" in task else task, reward=reward_name) as reward:
            assert reward.binary == (task in BINARY)
    message = "maths is not known; choose exact, numeric, math or your own"
    with pytest.raises(ValueError, match=message), _opened("toy:Digits", reward="maths"):
        pass


def test_a_binary_reward_that_is_graded_is_refused():
    message = r"reward: is 0\.5 for prompt 4 .* its `binary` says 0 or 1"
    with _opened("add", reward="toy:strict") as reward, pytest.raises(ValueError, match=message):
        reward.values([Problem(4, "q", "1")], [["a"]])
