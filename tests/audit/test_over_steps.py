"""`zerokl audit LOG --steps --bar NAME`: the columns of a log step by step, under what a project asks."""

import json

import pytest
from zerokl.audit.figures.bars import BARS
from zerokl.cli import main


def write(path, steps, difference=0.01, extra=()):
    """Two completions a step; of the step `s` the columns differ by difference, or by extra[s]."""
    lines = []
    for step in steps:
        d = dict(extra).get(step, difference)
        for sample in range(2):
            sampler = [-0.5, -1.0, -1.5]
            row = {"step": step, "sample": sample, "prompt_ids": [1], "completion_ids": [5, 6, 7]}
            row |= {"temperature": 1.0, "logprobs": sampler, "trainer_logprobs": [x + d for x in sampler]}
            lines.append(row)
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))
    return lines


def audit(path, out, *words):
    code = main(["audit", str(path), *words, "--out", str(out)])
    return code, json.loads((out / "audit.json").read_text())


def test_a_log_of_twenty_steps_holds_prime_rls_bar(tmp_path, capsys):
    write(tmp_path / "log.jsonl", range(20), 0.1)  # exp(0.1) - 1 - 0.1 = 0.00517
    code, report = audit(tmp_path / "log.jsonl", tmp_path / "out", "--steps", "--bar", "prime-rl")
    assert code == 0
    assert [row["step"] for row in report["steps"]] == list(range(20))
    assert {round(row["bar"], 6) for row in report["steps"]} == {0.005171}
    shown = " ".join(capsys.readouterr().out.split())
    assert "Bar prime-rl holds: mismatch_kl is at most 0.005171 over 20 steps" in shown
    assert "the math environment, and a batch_size of 64: the log does not tell it" in shown
    page = (tmp_path / "out" / "audit.html").read_text()
    assert "mismatch_kl" in page
    assert "step-000000" not in page


def test_one_step_beyond_it_is_named(tmp_path, capsys):
    write(tmp_path / "log.jsonl", range(20), 0.1, {7: 0.2}.items())  # 0.0214
    code, report = audit(tmp_path / "log.jsonl", tmp_path / "out", "--bar", "prime-rl")
    assert (code, report["outcome"]["kind"]) == (1, "beyond")
    assert "1 of 20 steps are beyond, first step 7." in " ".join(capsys.readouterr().out.split())


def test_too_few_steps_show_no_bar(tmp_path, capsys):
    write(tmp_path / "log.jsonl", [*range(10), *range(15, 24)])
    code, report = audit(tmp_path / "log.jsonl", tmp_path / "out", "--bar", "prime-rl")
    assert (code, report["outcome"]["faults"]) == (1, ["19 of the 20 steps that prime-rl asks for"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Of the steps 0 to 23 the log holds 19." in shown
    assert "is not shown: it asks for 20 steps" in shown


def test_what_a_log_lacks_is_told(tmp_path, capsys):
    lines = write(tmp_path / "log.jsonl", range(2))
    del lines[0]["step"], lines[1]["trainer_logprobs"]
    lines[2]["logprobs"][1] = None
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    code, _ = audit(tmp_path / "log.jsonl", tmp_path / "out", "--steps", "--max_abs", "0.1")
    shown = " ".join(capsys.readouterr().out.split())
    assert code == 1, "a number is missing beside a drawn token, which no tolerance excuses"
    assert "1 of 4 completions have no step, and are left out." in shown
    assert "1 of 4 completions have no trainer's column, and are left out." in shown
    assert "1 drawn tokens lack one of two log-probabilities" in shown


@pytest.mark.parametrize(("bound", "code"), [("0.05", 0), ("0.005", 1)])
def test_a_tolerance_is_asked_of_each_step(tmp_path, bound, code):
    write(tmp_path / "log.jsonl", range(3))
    assert audit(tmp_path / "log.jsonl", tmp_path / "out", "--steps", "--max_abs", bound)[0] == code


def test_a_log_without_steps_is_refused(tmp_path, capsys):
    lines = write(tmp_path / "log.jsonl", range(1))
    (tmp_path / "log.jsonl").write_text(json.dumps({k: v for k, v in lines[0].items() if k != "step"}) + "\n")
    words = [str(tmp_path / "log.jsonl"), "--steps", "--out", str(tmp_path / "out")]
    assert main(["audit", *words]) == 2
    assert "holds no step" in capsys.readouterr().err
    assert main(["audit", *words, "--every", "2"]) == 2
    assert "do not go with them" in capsys.readouterr().err


def test_a_bar_says_where_it_is_from():
    assert all(".md" in bar.gate.source and bar.steps >= 1 for bar in BARS.values())
