"""Tasks: problems are reproducible, splits are disjoint, right answers earn 1 and near misses 0."""

import json
import math
import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zerokl.engine.config import Config, TaskConfig
from zerokl.engine.init_config import InitConfig, InitSettings
from zerokl.engine.runs.base_model import is_base
from zerokl.engine.runs.init import initialise
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


def _write(path: Path, *lines: str) -> str:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


GOOD = json.dumps({"prompt": "1+1", "answer": "2"})


def test_jsonl_reads_prompts_and_answers_of_any_type(tmp_path):
    file = _write(
        tmp_path / "a.jsonl",
        '{"prompt": "q\u2028r\u0085é", "answer": 3}',
        "",
        '{"prompt": "s", "answer": "\\\\frac12", "id": 9}',
    )
    problems = load_task("jsonl", {"file": file}).problems("train")
    assert sorted((p.prompt, p.answer) for p in problems) == [("q\u2028r\u0085é", "3"), ("s", "\\frac12")]


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "x"',
        "[1, 2]",
        '"text"',
        "7",
        '{"prompt": "x"}',
        '{"answer": "x"}',
        '{"prompt": 3, "answer": "x"}',
        '{"prompt": null, "answer": 1}',
        '{"prompt": "x", "answer": null}',
        "[" * 100_000,
        '{"prompt": "x", "answer": ' + "9" * 5000 + "}",
    ],
    ids=lambda line: line[:30],
)
def test_jsonl_names_the_line_that_is_malformed(tmp_path, line):
    file = _write(tmp_path / "a.jsonl", GOOD, "", line, GOOD)
    with pytest.raises(ValueError, match=r"a\.jsonl line 3 "):
        load_task("jsonl", {"file": file})


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_jsonl_refuses_an_empty_file(tmp_path, content):
    with pytest.raises(ValueError, match=r"a\.jsonl holds no problems"):
        load_task("jsonl", {"file": _write(tmp_path / "a.jsonl", content)})


def test_jsonl_refuses_a_file_that_is_missing_or_no_text(tmp_path):
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe{}")
    for name, reason in (
        ("a.jsonl", "cannot be read"),
        ("b.jsonl", "line 1 is not UTF-8"),
        (".", "cannot be read"),
    ):
        with pytest.raises(ValueError, match=f"{name} {reason}"):
            load_task("jsonl", {"file": str(tmp_path / name)})


def test_jsonl_is_read_as_utf8_whatever_the_locale(tmp_path):
    file = _write(tmp_path / "a.jsonl", '{"prompt": "né", "answer": 1}')
    code = (
        "from zerokl.engine.tasks.loading import load_task; "
        f"task = load_task('jsonl', {{'file': {file!r}}}); "
        "print(ascii(task.problems('train')[0].prompt))"
    )
    # With these settings the encoding of the locale is ASCII.
    ascii_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment = {**os.environ, **ascii_locale}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert process.stdout == "'n\\xe9'\n", process.stderr


def test_jsonl_holds_out_lines_or_a_file(tmp_path):
    lines = [json.dumps({"prompt": f"q{i}", "answer": i}) for i in range(10)]
    ten, two = _write(tmp_path / "a.jsonl", *lines), _write(tmp_path / "b.jsonl", *lines[:2])
    task = load_task("jsonl", {"file": ten, "held_out": 3})
    assert (len(task.problems("train")), len(task.problems("held_out"))) == (7, 3)
    assert {p.prompt for s in ("train", "held_out") for p in task.problems(s)} == {f"q{i}" for i in range(10)}
    assert len(load_task("jsonl", {"file": ten, "held_out_file": two}).problems("held_out")) == 2
    with pytest.raises(ValueError, match="train"):
        load_task("jsonl", {"file": ten, "held_out": 10})


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("72", "So it is \\boxed{72}.", 1.0),
        ("72", "She sold 72 clips.", 1.0),
        ("72", "first 71, then \\boxed{72}", 1.0),
        ("\\frac{1}{2}", "\\boxed{0.5}", 1.0),
        ("1,000", "\\boxed{1000}", 1.0),
        ("72", "\\boxed{73}", 0.0),
        ("72", "\\boxed{}", 0.0),
        ("72", "", 0.0),
        ("72", "I do not know", 0.0),
    ],
)
def test_jsonl_rewards_what_math_verify_finds_equal(tmp_path, answer, completion, reward):
    task = load_task("jsonl", {"file": _write(tmp_path / "a.jsonl", GOOD)})
    assert task.reward(Problem(0, "q", answer), completion) == reward


# Word problems like those of GSM8K and similar data sets, with the forms of answer that occur there.
WORD_PROBLEMS = {
    "A box holds 12 eggs. How many eggs are in 4 boxes?": "48",
    "A shirt costs 35 dollars and a hat 7.50. What do both cost?": "42.50",
    "A town of 1200 people grows by 1500. How many live there now?": "2,700",
    "The water fell from 3 metres to 5 below zero. Where is it now?": "-5",
    "A cake is cut into 8 pieces, and 3 are eaten. Which part is left?": "\\frac{5}{8}",
    "Of 60 seats 45 are taken. How many percent is that?": "75\\%",
}


@pytest.mark.parametrize(("prompt", "answer"), WORD_PROBLEMS.items())
def test_answers_of_word_problems_are_read_and_rewarded(tmp_path, prompt, answer):
    file = _write(tmp_path / "a.jsonl", json.dumps({"prompt": prompt, "answer": answer}))
    task = load_task("jsonl", {"file": file})
    (problem,) = task.problems("train")
    assert task.reward(problem, f"So the answer is \\boxed{{{answer}}}.") == 1.0
    assert task.reward(problem, "So the answer is \\boxed{1234}.") == 0.0


def test_every_task_of_the_table_is_tested_here():
    """Those with an environment are in test_environments.py, and pairs are in test_pairs.py."""
    of_one_turn = {name for name, task in TASKS.items() if not hasattr(task, "environment")}
    assert {*GENERATED, "jsonl", "pairs"} == of_one_turn


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


def test_init_obeys_its_settings(tmp_path):
    """A target, bounds, sizes and numbers of problems and samples; the same seed gives the same model."""
    settings = InitSettings(
        target=0.1,
        solved=(0.0, 0.5),
        problems=7,
        attempts=4,
        sizes={"hidden_size": 32, "num_hidden_layers": 1},
    )
    report = initialise(tmp_path / "m", "toy:Digits", {"n": 40}, "mini", 0, settings)
    assert 0.1 <= report["accuracy"] < 0.5
    assert (len(report["prompts"]) <= 7, report["samples"]) == (True, 4)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["head_dim"]) == (32, 1, 32)
    again = initialise(tmp_path / "again", "toy:Digits", {"n": 40}, "mini", 0, settings)
    assert again == report
    first, second = ((tmp_path / f / "model.safetensors").read_bytes() for f in ("m", "again"))
    assert first == second


def test_a_base_model_of_other_settings_is_another_one(tmp_path):
    settings = InitSettings(target=0.1, sizes={"hidden_size": 32, "num_hidden_layers": 1})
    task = TaskConfig(name="toy:Digits", options={"n": 40})
    asked = Config(model="init:mini", task=task, seed=5, init=InitConfig(**settings.model_dump(), seed=0))
    initialise(tmp_path / "m", "toy:Digits", {"n": 40}, "mini", 0, settings)
    assert is_base(tmp_path / "m", asked)
    for change in ({"seed": -1}, {"seed": 1}, {"target": 0.2}, {"sizes": {}}):
        other = asked.init.model_copy(update=change)
        assert not is_base(tmp_path / "m", asked.model_copy(update={"init": other})), change


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": 1.0}, "less than 1"),
        ({"solved": (0.8, 0.2)}, "must not be above the second"),
        ({"sizes": {"layers": 2}}, "layers is not known; sizes are hidden_size"),
        ({"sizes": {"hidden_size": 0}}, "hidden_size \\(0\\) must be at least 1"),
    ],
)
def test_init_refuses_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        InitSettings(**settings)


def test_init_stops_when_it_solves_some_and_says_which(tmp_path):
    options = {"n": 40}
    report = initialise(tmp_path / "m", "toy:Digits", options, "tiny", 0)
    assert 0.3 <= report["accuracy"] <= 0.8
    assert report["options"] == options
    assert set(report["prompts"]) <= {p.prompt for p in load_task("toy:Digits", options).problems("train")}
    assert report in [json.loads(p.read_text()) for p in (tmp_path / "m").glob("*.json")]
    assert {p.name for p in tmp_path.iterdir()} == {"m"}, "nothing temporary is left"
    with pytest.raises(ValueError, match="already exists"):
        initialise(tmp_path / "m", "toy:Digits", options, "tiny", 0)


@pytest.mark.parametrize("name", ["jsonl", "toy:Riddles"])
def test_init_refuses_a_task_whose_answers_are_no_completions(tmp_path, name):
    options = {"file": _write(tmp_path / "a.jsonl", GOOD)} if name == "jsonl" else {}
    with pytest.raises(ValueError, match="answers that are no completions"):
        initialise(tmp_path / "m", name, options, "tiny", 0)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    "completion",
    [
        "$9^{9^{9^{9}}}$",
        "9**9**9**9",
        "\\boxed{100000000!}",
        "\\boxed{(10^{10})!}",
        "\\boxed{9^{9^{9^9}}}",
        "\\boxed{2^{1000000000}}",
        "\\boxed{\\sum_{n=1}^{10^{9}} \\frac{1}{n}}",
        "\\boxed{10^{-10^{9}}}",
    ],
)
def test_a_completion_that_would_take_for_ever_to_compare_is_no_answer(tmp_path, completion):
    """There is no time limit: it would let the machine's load decide a reward."""
    file = _write(tmp_path / "p.jsonl", json.dumps({"prompt": "1+1=", "answer": "18"}))
    task = load_task("jsonl", {"file": file})
    (problem,) = task.problems("train")
    began_s = time.process_time()
    assert task.reward(problem, completion) == 0.0
    assert time.process_time() - began_s < 5.0
    for right in ("\\boxed{2^4 + 2}", "it is $\\frac{36}{2}$", "18"):
        assert task.reward(problem, right) == 1.0, right


@pytest.mark.parametrize("answer", ["", None, True, {"a": 1}, [1]], ids=str)
def test_an_answer_that_is_none_is_refused_with_its_line(tmp_path, answer):
    file = _write(tmp_path / "p.jsonl", GOOD, json.dumps({"prompt": "1+2=", "answer": answer}))
    message = r"p.jsonl line 2 must have an \"answer\": a string that is not empty, or a number"
    with pytest.raises(ValueError, match=message):
        load_task("jsonl", {"file": file})


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "1+1=", "answer": 2}\n{"prompt": "\xff", "answer": 2}\n')
    with pytest.raises(ValueError, match=r"p.jsonl line 2 is not UTF-8"):
        load_task("jsonl", {"file": str(tmp_path / "p.jsonl")})


ROW = json.dumps({"question": "How many?", "solution": "6 * 7 is it.\n#### 42", "id": 1})


def test_jsonl_takes_columns_the_part_of_an_answer_a_template_and_a_system_prompt(tmp_path):
    options = {"file": _write(tmp_path / "a.jsonl", ROW), "prompt": "question", "answer": "solution"}
    problem = Problem(0, "Q: How many?\nA: {b}", "42", "Be short.")
    options |= {"answer_after": "####", "template": "Q: {prompt}\nA: {b}", "system": "Be short."}
    assert load_task("jsonl", options).problems("train") == [problem]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {},
            "line 1 must have a \"prompt\"; it has 'question', 'solution', 'id': name the column in "
            "task.options.prompt",
        ),
        ({"prompt": "question"}, 'line 1 must have an "answer"; it has'),
        ({"prompt": "question", "answer": "solution", "answer_after": "=>"}, "has no such text"),
        ({"prompt": "question", "answer": "solution", "answer_after": "42"}, "has nothing after it"),
        ({"prompt": "id", "answer": "solution"}, 'a "id": a string that is not empty; this one is a number'),
        ({"template": "Q"}, "template ('Q') must hold {prompt}"),
        ({"system": "s", "chat": False}, "system needs a chat template"),
        ({"chat": 1}, "chat (1) must be true or false"),
        ({"held_out": 1.5}, "held_out (1.5) must be a number of lines, or a share"),
        ({"held_out": "2"}, "held_out ('2') must be a whole number, or a share"),
        ({"held_out": 1, "held_out_file": "b.jsonl"}, "give one"),
    ],
    ids=str,
)
def test_trouble_with_a_file_is_one_line_that_names_the_remedy(tmp_path, options, message):
    columns = {"prompt": "question", "answer": "solution"} if options.keys() - {"prompt", "answer"} else {}
    options = {"file": _write(tmp_path / "a.jsonl", ROW)} | columns | options
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        load_task("jsonl", options)
    assert "\n" not in str(refused.value)


def test_a_share_is_held_out_by_the_seed(tmp_path):
    lines = [json.dumps({"prompt": f"q{i}", "answer": i}) for i in range(30)]
    file = _write(tmp_path / "a.jsonl", *lines)

    def held_out(share: float, seed: int) -> list[str]:
        task = load_task("jsonl", {"file": file, "held_out": share, "seed": seed})
        return [p.prompt for p in task.problems("held_out")]

    assert held_out(0.1, 0) == held_out(0.1, 0) == held_out(3, 0) != held_out(0.1, 1)
    assert (len(held_out(0.1, 0)), len(held_out(0.01, 0))) == (3, 1)


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
    options = {"file": _write(tmp_path / "a.jsonl", GOOD)}
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
