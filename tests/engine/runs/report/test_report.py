"""The page of `zerokl report` and `load_run`, without a browser."""

import base64
import gzip
import hashlib
import json
import math
import re

import pytest
import zerokl
from zerokl.cli import main
from zerokl.engine.runs.report import rollouts as packing
from zerokl.engine.runs.report.charts import CHARTS, STATIONS
from zerokl.engine.runs.report.page import live_page, open_sources, write_report
from zerokl.engine.runs.report.payload import page_title
from zerokl.engine.runs.report.rollouts import BLOCK_ROWS, RolloutLog
from zerokl.verify.run_environment import PACKAGE_ROOT

from tests.helpers import contents
from tests.made_run import HOSTILE, made_run, metrics_line, write_lines, write_rollouts


def unpacked(html: str, name: str):
    """The data called `name` in a page."""
    content = re.search(rf'<script type="text/plain" id="{name}">([A-Za-z0-9+/=]*)</script>', html)[1]
    return json.loads(gzip.decompress(base64.b64decode(content)))


def payload_of(*runs):
    return unpacked(write_report(runs, runs[0].parent / "page.html").read_text(), "payload")


def test_every_chart_has_a_metric_that_the_documentation_explains():
    documented = set(re.findall(r"^\| `([^`]+)`", (PACKAGE_ROOT / "docs/metrics.md").read_text(), re.M))
    documented |= {name.replace("LOSS", "own") for name in documented}  # one of several losses
    names = [chart.metric for chart in CHARTS] + [station[0] for station in STATIONS]
    assert len(set(names)) == len(names)
    assert set(names) <= documented


def test_the_page_is_one_file_that_asks_the_network_for_nothing(tmp_path):
    html = write_report([made_run(tmp_path / "run")]).read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    assert policy.startswith("default-src 'none'; ")
    assert "connect-src 'none'" in policy
    assert "unsafe" not in policy
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert not re.search(
        r"""(src|href)=["'](?!data:|#)""", re.sub(r"<script.*?</script>", "", html, flags=re.S)
    )


def test_hostile_text_is_no_markup_in_the_file(tmp_path):
    run = made_run(tmp_path / "<b>run", text=lambda i: HOSTILE)
    html = write_report([run]).read_text()
    assert "<title>&lt;b&gt;run · zerokl report</title>" in html
    assert "onerror" not in html
    assert unpacked(html, "texts-0-0")["text"][0] == HOSTILE


def test_the_figures_are_those_of_the_files(tmp_path):
    run = made_run(tmp_path / "run", steps=6, k3=0.25, settings={"exact": False})
    shown = payload_of(run)["runs"][0]
    assert shown["figures"]["reward_first"] == 0.2
    assert shown["figures"]["reward_last"] == pytest.approx(sum(0.2 + 0.7 * i / 5 for i in range(1, 6)) / 5)
    assert (shown["figures"]["tokens"], shown["figures"]["unequal"]) == (192, 96)
    assert shown["figures"]["max_abs"] == 0.75
    assert shown["status"] == {"state": "done", "text": "finished, 6 steps"}
    assert shown["ledger"]["fingerprint"] == json.loads((run / "summary.json").read_text())["fingerprint"]
    assert shown["ledger"]["damage"] == ""
    assert shown["pieces"]["3"] == "0"
    assert [done for done, _ in shown["held_out"]] == [0, 2, 4, 6]
    assert [x for _, x in shown["held_out"]] == pytest.approx([0.25, 0.38, 0.54, 0.7])
    assert (shown["figures"]["held_out_first"], shown["figures"]["held_out_last"]) == (0.25, 0.7)


def test_steps_without_a_signal_are_counted(tmp_path):
    run = made_run(tmp_path / "run", steps=3)
    assert payload_of(run)["runs"][0]["figures"]["no_signal"] == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    silent = [json.dumps(row | {"grad_norm": 0.0 if row["step"] else 1.0}) + "\n" for row in rows]
    (run / "metrics.jsonl").write_text("".join(silent))
    assert payload_of(run)["runs"][0]["figures"]["no_signal"] == 2


def test_seconds_a_step_are_those_of_the_steps(tmp_path):
    """Not of the process, whose set-up, evaluations and checkpoints are in the summary's seconds."""
    run = made_run(tmp_path / "run", steps=6)
    figures = payload_of(run)["runs"][0]["figures"]
    assert (figures["step_s"], figures["seconds"]) == (1.5, 12.5)


def test_the_examples_are_the_same_prompts_early_and_late(tmp_path):
    shown = payload_of(made_run(tmp_path / "run", steps=6))["runs"][0]["examples"]
    assert shown["same_prompts"]
    # Steps 0 to 5 draw the problems 0 1, 2 0, 1 2, 0 1, 2 0, 1 2. Of those whose mean rose, and of the rest,
    # the pair nearest to both ends comes first.
    steps = [(e["prompt_text"], *(w["step"] for w in e["written"])) for e in shown["prompts"]]
    assert steps == [("2+2=", 1, 5), ("1+1=", 0, 5), ("0+0=", 0, 4)]
    gains = [late["mean"] - early["mean"] for early, late in (e["written"] for e in shown["prompts"])]
    assert gains[0] > 0 >= max(gains[1:])
    counts = (1, sum(gain < 0 for gain in gains), 3)
    assert (shown["rose"], shown["fell"], shown["again"]) == counts
    early, late = next(e["written"] for e in shown["prompts"] if e["prompt_text"] == "1+1=")
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    for written, prompt in ((early, 1), (late, 0)):
        group = [r for r in lines if (r["step"], r["prompt"]) == (written["step"], prompt)]
        assert (written["text"], written["reward"]) == (group[0]["text"], group[0]["reward"])
        assert (written["n"], written["mean"]) == (4, sum(r["reward"] for r in group) / 4)


@pytest.mark.parametrize(("steps", "shown_steps"), [(1, [0, 0]), (4, [0, 0, 3, 3])])
def test_where_no_prompt_occurs_again_the_page_says_so(tmp_path, steps, shown_steps):
    shown = payload_of(made_run(tmp_path / "run", steps=steps, problems=99))["runs"][0]["examples"]
    assert not shown["same_prompts"]
    assert [w["step"] for e in shown["prompts"] for w in e["written"]] == shown_steps
    assert len({e["prompt_text"] for e in shown["prompts"]}) == len(shown_steps)


def test_the_examples_begin_anew_with_a_log_that_was_cut_back(tmp_path):
    run = made_run(tmp_path / "run", steps=6)
    log = RolloutLog(run / "rollouts.jsonl")
    log.read()
    lines = (run / "rollouts.jsonl").read_text().splitlines(keepends=True)
    (run / "rollouts.jsonl").write_text("".join(lines[: 2 * 8]))
    log.read()
    (example,) = log.history.examples()["prompts"]
    assert [w["step"] for w in example["written"]] == [0, 1]
    assert example["written"][0]["n"] == 4


def test_counts_are_not_smoothed():
    counts = {"groups", "completions", "updates", "0 or 1"}
    assert {chart.unit for chart in CHARTS} >= counts
    assert not [chart.metric for chart in CHARTS if chart.smooth and chart.unit in counts]


def test_a_damaged_ledger_is_shown(tmp_path):
    run = made_run(tmp_path / "run")
    ledger = run / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes().replace(b'"step":2,', b'"step":3,', 1))
    assert "line 4 was altered" in payload_of(run)["runs"][0]["ledger"]["damage"]


def test_a_mismatch_that_stopped_the_run_is_told(tmp_path):
    run = made_run(tmp_path / "run", steps=2, planned=9)
    report = {"step": 2, "prompt": 1, "sample": 0, "position": 3, "trainer": -1.5, "sampler": -1.25}
    (run / "mismatch").mkdir()
    (run / "mismatch" / "mismatch.json").write_text(json.dumps(report | {"unequal": 7, "compared": 32}))
    status = payload_of(run)["runs"][0]["status"]
    assert status["state"] == "stopped"
    assert "step 2" in status["text"]
    assert "7 of 32 tokens" in status["text"]


def test_a_damaged_tokenizer_ends_no_report(tmp_path):
    run = made_run(tmp_path / "run")
    for name in ("step-000002", "step-000009.damaged"):
        (run / "checkpoints" / name).mkdir(parents=True)
        (run / "checkpoints" / name / "tokenizer.json").write_text("")
    assert write_report([run]).exists()


def test_runs_are_compared_with_the_first(tmp_path):
    a, b, c = (made_run(tmp_path / name, fork=fork) for name, fork in [("a", None), ("b", 2), ("c", None)])
    shown = payload_of(a, b, c)
    assert [(x["equal"], x["text"]) for x in shown["comparisons"]] == [
        (False, "step 2: tokens"),
        (True, "equal to the bit: 4 steps"),
    ]
    assert not any(row["differs"] for row in shown["settings"])


def test_settings_that_differ_are_marked(tmp_path):
    shown = payload_of(made_run(tmp_path / "a"), made_run(tmp_path / "b", settings={"workers": 2}))
    assert [(r["key"], r["values"], r["decides"]) for r in shown["settings"] if r["differs"]] == [
        ("workers", ["0", "2"], False)
    ]


def test_the_folder_of_an_ablation_stands_for_its_cells(tmp_path):
    runs = [made_run(tmp_path / "cells" / f"lr={lr}" / f"seed-{s}") for lr in (1, 2) for s in (0, 1)]
    combinations = [
        {
            "settings": {"optimizer.lr": str(lr)},
            "runs": [{"run": str(r)} for r in runs if f"lr={lr}" in str(r)],
        }
        for lr in (1, 2)
    ]
    (tmp_path / "ablation.json").write_text(json.dumps({"combinations": combinations}))
    sources = open_sources([tmp_path])
    assert [source.group for source in sources] == ["lr 1", "lr 1", "lr 2", "lr 2"]
    assert sources[0].label == "lr=1/seed-0"


def test_the_page_of_an_ablation_has_its_factors_and_effects(tmp_path):
    runs = {
        (lr, seed): made_run(
            tmp_path / "cells" / f"lr={lr}" / f"seed-{seed}", k3=0.1 * lr, settings={"exact": False}
        )
        for lr in (1, 2)
        for seed in (0, 1, 2)
    }
    combinations = [
        {"settings": {"lr": str(lr), "same": "x"}, "runs": [{"run": str(runs[lr, s])} for s in (0, 1, 2)]}
        for lr in (1, 2)
    ]
    (tmp_path / "ablation.json").write_text(json.dumps({"combinations": combinations}))
    shown = unpacked(write_report([tmp_path]).read_text(), "payload")
    assert shown["factors"] == ["lr"], "what all cells share is no factor"
    assert shown["runs"][0]["factors"] == {"lr": "1", "same": "x"}
    verdicts = {e["figure"]: e["verdict"] for e in shown["effects"]}
    assert verdicts["mismatch_k3_mean"] == "exceeds"
    assert verdicts["reward_last10"] == "within"
    assert shown["effects"][0]["figure"] == "mismatch_k3_mean"
    one, two = shown["combinations"]
    assert (one["name"], one["settings"]) == ("lr 1, same x", {"lr": "1", "same": "x"})
    assert [run["reward_last10"] for run in two["runs"]] == pytest.approx([0.55] * 3)
    assert one["mean"]["held_out_last"] == pytest.approx(0.7)
    assert one["mean"]["mismatch_k3_sequence_mean"] is None, "no run has it"
    plain = payload_of(runs[1, 0], runs[2, 0])
    assert (plain["factors"], plain["combinations"]) == ([], [])


def test_blocks_hold_every_rollout_and_go_on_where_they_stopped(tmp_path):
    run = made_run(tmp_path / "run", steps=40, P=4, G=8)
    log = RolloutLog(run / "rollouts.jsonl")
    log.read()
    before = log.blocks[0]
    write_rollouts(run, range(40, 42), 4, 8)
    with open(run / "rollouts.jsonl", "a") as file:
        file.write('{"step": 42, "pro')  # a line that is being written
    log.read()
    blocks = log.all_blocks()
    assert blocks[0] is before
    assert [block.rows for block in blocks] == [BLOCK_ROWS, 42 * 32 - BLOCK_ROWS]
    steps = [s for block in blocks for s in json.loads(gzip.decompress(block.index))["step"]]
    assert steps == [s for s in range(42) for _ in range(32)]
    assert log.damage == ""


def test_a_log_that_is_too_large_keeps_whole_steps_evenly(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "MAX_ROLLOUTS", 40)
    run = made_run(tmp_path / "run", steps=21)
    log = RolloutLog(run / "rollouts.jsonl")
    log.read()
    index = json.loads(gzip.decompress(log.all_blocks()[0].index))
    assert sorted(set(index["step"])) == [0, 5, 10, 15, 20]
    assert (log.rows, log.left_out) == (40, 168 - 40)


def test_a_line_that_is_no_rollout_is_said(tmp_path):
    run = made_run(tmp_path / "run")
    write_lines(run / "rollouts.jsonl", [{"step": 4}])
    shown = payload_of(run)["runs"][0]["rollouts"]
    assert shown["rows"] == 32
    assert "a line that is no rollout" in shown["damage"]


def test_load_run_gives_metrics_rollouts_and_ledger(tmp_path):
    path = made_run(tmp_path / "run")
    run = zerokl.load_run(path)
    assert run.steps == 4
    assert next(iter(run.metrics)) == "step"
    assert {len(column) for column in run.metrics.values()} == {4}
    accuracy = run.metrics["eval/reward"]
    assert math.isnan(accuracy[0])
    assert accuracy[3] == 0.7
    assert [(r["step"], r["prompt"], r["sample"]) for r in run.rollouts({2})] == [
        (2, p, g) for p in range(2) for g in range(4)
    ]
    assert len(list(run.rollouts())) == 32
    assert [line.step for line in run.ledger.lines] == [0, 1, 2, 3]
    assert run.ledger.chain == run.summary["fingerprint"]


def test_load_run_of_a_run_that_goes_on(tmp_path):
    path = made_run(tmp_path / "run", planned=9)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        with open(path / name, "a") as file:
            file.write('{"step": 4, ')
    run = zerokl.load_run(path)
    assert run.summary is None
    assert run.steps == 4
    assert len(list(run.rollouts())) == 32


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["report"], "no run was given"),
        (["report", "nowhere"], "nowhere holds no run"),
        (["report", "run", "--out", "mine.html"], "is no report of zerokl"),
        (["report", "audit"], "audit holds an audit"),
        (["report", "broken"], "line 5 is not JSON"),
        (["watch"], "no run was given"),
        (["watch", "nowhere"], "nowhere holds no run"),
        (["watch", "run", "--port", "70000"], "port 70000 cannot be had"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(tmp_path, monkeypatch, capsys, words, reason):
    monkeypatch.chdir(tmp_path)
    made_run(tmp_path / "run")
    with open(made_run(tmp_path / "broken") / "metrics.jsonl", "a") as file:
        file.write("{\n")
    (tmp_path / "mine.html").write_text("mine")
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit" / "audit.json").write_text("{}")
    before = contents(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert reason in error
    assert contents(tmp_path) == before


WRONG = ["x", [1], {"a": 1}, 1e308, 10**400]


@pytest.mark.parametrize("wrong", [*WRONG, None, -1, 0.5], ids=lambda value: str(value)[:9])
def test_a_step_that_is_none_is_one_line_that_names_file_line_and_key(tmp_path, capsys, wrong):
    assert_refused(tmp_path, capsys, "step", wrong)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda value: str(value)[:9])
@pytest.mark.parametrize("name", [name for name in metrics_line(0, 2, 4) if name != "step"])
def test_a_metric_that_is_no_number_is_one_line_that_names_file_line_and_key(tmp_path, capsys, name, wrong):
    assert_refused(tmp_path, capsys, name, wrong)


def assert_refused(tmp_path, capsys, name, wrong):
    file = change_metrics(made_run(tmp_path / "run"), 3, name, wrong)
    assert main(["report", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"zerokl: run: {file} line 3 has {name} (")
    assert error.count("\n") == 1
    with pytest.raises(ValueError, match=f"line 3 has {name} "):
        zerokl.load_run(tmp_path / "run")


def change_metrics(run, number, name, value):
    """Set a key in a line of metrics.jsonl. Returns the file."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines()
    lines[number - 1] = json.dumps(json.loads(lines[number - 1]) | {name: value})
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.mark.parametrize("value", [None, 1e299, -1e299, 0], ids=str)
@pytest.mark.parametrize("name", [name for name in metrics_line(0, 2, 4) if name != "step"])
def test_a_metric_that_is_null_or_large_is_shown(tmp_path, name, value):
    run = made_run(tmp_path / "run")
    for number in (2, 3):
        change_metrics(run, number, name, value)
    assert main(["report", str(run)]) == 0


@pytest.mark.parametrize("reward", [1e308, "Infinity", "-Infinity", "NaN"])
def test_rewards_whose_sum_is_no_number_are_shown(tmp_path, reward):
    file = made_run(tmp_path / "run") / "rollouts.jsonl"
    lines = [json.loads(line) | {"reward": reward} for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert payload_of(tmp_path / "run")["runs"][0]["rollouts"]["rows"] == 32


@pytest.mark.parametrize("line", ["[1]", "3", '"x"', "null", '{"tokens": 3}'])
def test_a_line_that_is_no_row_of_metrics_is_named(tmp_path, capsys, line):
    with open(made_run(tmp_path / "run") / "metrics.jsonl", "a") as file:
        file.write(line + "\n")
    assert main(["report", str(tmp_path / "run")]) == 2
    assert "metrics.jsonl line 5 " in capsys.readouterr().err


def test_a_title_shows_what_a_terminal_or_a_browser_would_obey(tmp_path):
    name = "\x1b[31m\u202e\u2066<title>\x07"
    page = write_report([made_run(tmp_path / name)]).read_text(encoding="utf-8")
    assert "\\x1b[31m\\u202e\\u2066&lt;title&gt;" in page
    for hidden in "\x1b\u202e\u2066\x07":
        assert hidden not in page
    assert live_page(page_title([tmp_path / "\x1b\u202e"])).count("\\x1b\\u202e") == 1


def test_the_command_writes_the_page_again(tmp_path, capsys):
    run = made_run(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"report {run / 'report.html'}"] * 2
