"""The task `jsonl`: columns, splits, answers that math-verify compares, and faults by line."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from zerokl.engine.tasks.base import Problem
from zerokl.engine.tasks.loading import load_task


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
