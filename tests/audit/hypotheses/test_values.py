"""What is no log-probability is counted by kind, line, place and side, is a fault, and is left out."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from zerokl.audit import compare
from zerokl.audit.columns import audit_columns
from zerokl.audit.formats.record import is_logged_nan
from zerokl.audit.frameworks import zerokl as own
from zerokl.audit.logs.scan import scan_log
from zerokl.audit.page.rows import figure_rows
from zerokl.cli import main
from zerokl.kernels.sampling_params import SamplingParams as P

from tests.audit.figures.test_drawn_from import RAW, draw
from tests.audit.hypotheses import planted as model_log
from tests.audit.settings import audit_config, audit_json, columns_json

KINDS = {
    "NaN": math.nan,
    "null": None,
    "+Infinity": math.inf,
    "-Infinity": -math.inf,
    "a number above 0": 0.5,
    "-9999": -9999.0,
    "-1e+10": -1e10,
    "-1e+30": -1e30,
    "-100": -100.0,
}
COLUMNS = {"logprobs": "sampler", "trainer_logprobs": "trainer"}
LINES = (2, 5, 9, 14, 20)


def rows_of(sampler: P = RAW, trainer: P = RAW) -> list[dict]:
    """24 lines whose columns differ by rounding; with other parameters for the trainer, by these as well."""
    log = draw(0, sampler, sampler, trainer, 0.01, (6, 4, 20))
    return [
        {
            "prompt_ids": [x.group + 1],
            "completion_ids": x.ids.tolist(),
            "logprobs": x.sampler.tolist(),
            "trainer_logprobs": x.trainer.tolist(),
            "temperature": sampler.temperature,
        }
        for x in log
    ]


def planted(rows: list[dict], value, column: str) -> list[dict]:
    rows = json.loads(json.dumps(rows))
    for line in LINES:
        rows[line][column][line % 20] = value
    return rows


def masked(rows: list[dict]) -> list[dict]:
    """The same lines with the places of `planted` marked as not drawn."""
    return [
        row | {"mask": [int(line not in LINES or i != line % 20) for i in range(20)]}
        for line, row in enumerate(rows)
    ]


def write(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_counted_in_each_column_and_left_out(tmp_path, kind, column):
    log = write(tmp_path / "log.jsonl", planted(rows_of(), KINDS[kind], column))
    report = audit_columns(log)
    (count,) = report.log.no_logprobs
    assert (count.column, count.kind) == (f"the {COLUMNS[column]}'s", kind)
    assert (count.tokens, count.drawn, count.lines) == (5, 480, 5)
    assert count.first == f"{log}, line 3, position 2"
    assert report.outcome.faults == (f"{kind} in the {COLUMNS[column]}'s column",)
    assert not report.outcome.passed
    # All else is what it is of the log in which nobody drew these tokens.
    clean = audit_columns(write(tmp_path / "masked.jsonl", masked(rows_of())))
    assert clean.outcome.passed
    assert (report.figures, report.log.drawn_tokens) == (clean.figures, 480)
    assert report.log.hypotheses.best is report.log.trainer_column.best is None
    # Beside a token that nobody drew it is none.
    assert audit_columns(write(log, masked(planted(rows_of(), KINDS[kind], column)))).outcome == clean.outcome


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_beside_it_is_still_found(tmp_path, kind, column):
    rows = planted(rows_of(P(0.8), RAW), KINDS[kind], column)
    report = audit_columns(write(tmp_path / "log.jsonl", rows))
    assert report.cause.kind == "trainer without the temperature"
    assert f"{kind} in the {COLUMNS[column]}'s column" in report.outcome.faults
    assert not report.outcome.passed


def test_a_whole_line_counts_in_the_file_and_every_place_says_so(tmp_path, capsys):
    rows = rows_of()
    for row in rows[::4]:
        row["trainer_logprobs"] = [math.nan] * 20
    log, out = write(tmp_path / "log.jsonl", rows), tmp_path / "out"
    report = audit_columns(log)
    assert ("rollouts", "18 of 24") in [row[:2] for row in figure_rows(report)]
    assert main(["audit", str(log), "--out", str(out), "--junit", str(tmp_path / "junit.xml")]) == 1
    name, text = "NaN in the trainer's column", " ".join(capsys.readouterr().out.split())
    assert f"outcome: Fault: {name}" in text
    assert "beside 360 of 480 drawn tokens in the file, in 18 of 24 completions" in text
    saved = json.loads((out / "audit.json").read_text())
    assert [saved["logged"], saved["drawn_tokens"], saved["tokens"]] == [24, 480, 360]
    assert saved["outcome"]["faults"] == [saved["log_findings"][0]["name"]] == [name]
    assert (saved["no_logprobs"][0]["tokens"], saved["no_logprobs"][0]["lines"]) == (120, 6)
    assert name in (out / "audit.html").read_text().replace("&#x27;", "'")
    assert f'name="no fault: {name}"' in (tmp_path / "junit.xml").read_text()


def test_several_kinds_of_a_column_are_one_fault(tmp_path):
    rows = planted(rows_of(), None, "logprobs")
    rows[0]["logprobs"][:4] = [-9999.0, -8888.0, -7777.0, -6666.5]
    report = audit_columns(write(tmp_path / "log.jsonl", rows))
    kinds = ["-9999", "-8888", "-7777", "another constant", "null"]
    assert [x.kind for x in report.log.no_logprobs] == kinds
    assert len(report.outcome.faults) == 1


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}], ids=str)
def test_what_a_declared_cut_leaves_out_is_no_fault_of_a_column(tmp_path, cut):
    rows = [row | cut for row in rows_of()]
    rows[3]["trainer_logprobs"][4] = -math.inf
    report = audit_columns(write(tmp_path / "log.jsonl", rows))
    assert report.log.no_logprobs == []
    assert report.figures.outside.tokens == 1
    rows[3]["logprobs"][4] = -math.inf  # control: the sampler drew the token
    assert audit_columns(write(tmp_path / "log.jsonl", rows)).log.no_logprobs[0].kind == "-Infinity"


def test_a_trainers_infinity_where_the_log_declares_no_cut_is_a_fault(tmp_path):
    rows = [{k: v for k, v in row.items() if k != "temperature"} for row in rows_of()]
    rows[3]["trainer_logprobs"][4] = -math.inf
    log = write(tmp_path / "log.jsonl", rows)
    report = audit_columns(log)
    assert report.outcome.faults == ("-Infinity in the trainer's column",)
    assert report.figures.outside.tokens == 0
    declared = audit_columns(log, assumed_params=P(top_p=0.9))  # control: a flag declares it
    assert declared.log.no_logprobs == []
    assert declared.figures.outside.tokens == 1


def test_unlikely_and_certain_tokens_are_sound(tmp_path):
    rows = rows_of()
    for row in rows[:12]:
        row["logprobs"][:4] = row["trainer_logprobs"][:4] = [0.0, -30.0, -60.0, 0.01]
        row["logprobs"][4:] = row["trainer_logprobs"][4:] = [0.0] * 16
    # One number as low as that, and several of bf16, where every other one is whole.
    rows[20]["trainer_logprobs"][0] = -100.0
    for i in range(12):
        rows[21]["trainer_logprobs"][i] = -66.0 - 0.5 * (i // 3)
    report = audit_columns(write(tmp_path / "log.jsonl", rows))
    assert report.log.no_logprobs == []
    # control: one constant that is most of them
    for i in range(12):
        rows[21]["trainer_logprobs"][i] = -100.0
    assert audit_columns(write(tmp_path / "log.jsonl", rows)).log.no_logprobs[0].tokens == 13


def test_a_low_temperature_makes_numbers_low(tmp_path):
    rows = [row | {"temperature": 0.01} for row in rows_of()]
    rows[3]["trainer_logprobs"][0] = -2345.5
    assert audit_columns(write(tmp_path / "log.jsonl", rows)).log.no_logprobs == []
    rows[3]["trainer_logprobs"][0] = -1e6
    assert len(audit_columns(write(tmp_path / "log.jsonl", rows)).log.no_logprobs) == 1


def test_a_column_that_the_whole_log_lacks_is_unknown_and_no_fault(tmp_path):
    rows = [row | {"trainer_logprobs": [None] * 20} for row in rows_of()]
    log = write(tmp_path / "log.jsonl", rows)
    with pytest.raises(ValueError, match="holds no trainer logprobs beside the sampler's"):
        audit_columns(log)
    assert scan_log(log, 48).values.faults() == []
    with pytest.raises(
        ValueError, match="no token to compare: NaN in the trainer's column, 480 of 480 drawn"
    ):
        audit_columns(write(log, [row | {"trainer_logprobs": [math.nan] * 20} for row in rows]))


def test_lines_without_a_trainers_column_are_counted(tmp_path):
    rows = rows_of()
    for row in rows[:6]:
        del row["trainer_logprobs"]
    report = columns_json(write(tmp_path / "log.jsonl", rows))
    assert (report["sequences"], report["logged"], report["no_logprobs"]) == (18, 24, [])
    assert "in 18 of 24 completions; 6 hold no trainer's column" in report["log_notes"][0]
    assert report["outcome"]["passed"]


def test_what_is_no_number_at_all_is_malformed(tmp_path):
    for value in ("much", True, [-1.0]):
        log = write(tmp_path / "log.jsonl", planted(rows_of(), value, "logprobs"))
        with pytest.raises(ValueError, match=r"line 3: logprobs\[2\] .* must be a number"):
            audit_columns(log)


def test_a_log_without_a_trainers_column_needs_a_model_whatever_the_sampler_has(tmp_path):
    rows = [{k: v for k, v in row.items() if k != "trainer_logprobs"} for row in rows_of()]
    rows[3]["logprobs"][4] = math.nan
    with pytest.raises(ValueError, match="holds no trainer logprobs beside the sampler's"):
        audit_columns(write(tmp_path / "log.jsonl", rows))


def test_our_own_format_keeps_every_kind():
    row = rows_of()[0] | {"completion_ids": [1] * 6, "trainer_logprobs": None}
    row["logprobs"] = [math.nan, None, math.inf, -math.inf, -1e300, 5.0]
    (rollout,) = own.parse(row, Path())
    assert is_logged_nan(rollout.logprobs).tolist() == [True] + [False] * 5
    line = json.loads(json.dumps(own.as_row(rollout), allow_nan=False))
    assert line["logprobs"][:4] == ["NaN", None, "Infinity", "-Infinity"]
    (again,) = own.parse(line, Path())
    assert again.logprobs.tobytes() == rollout.logprobs.tobytes()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e30], ids=str)
def test_a_log_and_a_models_scores_are_asked_as_well(case, tmp_path, monkeypatch, value):
    log = model_log.write(tmp_path / "log.jsonl", case.rollouts)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[0]["logprobs"][1] = math.nan
    write(log, lines)
    score, drawn = compare.score, sum(len(x["completion_ids"]) for x in lines)

    def scored(engine, rollouts):
        scores = [x.copy() for x in score(engine, rollouts)]
        scores[2][3] = value
        scores[3][:] = value
        return scores

    monkeypatch.setattr(compare, "score", scored)
    report = audit_json(audit_config(str(case.folder), str(log), dtype="float32"))
    in_log, in_model = report["no_logprobs"]
    assert (in_log["column"], in_log["tokens"], in_log["drawn"]) == ("the sampler's", 1, drawn)
    assert (in_model["column"], in_model["tokens"]) == (
        "zerokl's",
        1 + len(lines[3]["completion_ids"]),
    )
    assert in_model["first"] == f"{log}, line 3, position 3"
    assert report["tokens"] == drawn - in_log["tokens"] - in_model["tokens"]
    assert report["sequences"] == len(lines) - 1
    assert len(report["outcome"]["faults"]) == 2
    assert not report["outcome"]["passed"]
    assert np.isfinite(report["max_abs"])


@pytest.mark.parametrize(("cut", "named"), [(2, False), (60, True)])
def test_few_tokens_at_the_edge_of_a_rounded_set_are_no_other_distribution(tmp_path, cut, named):
    rows = [row | {"top_p": 0.9} for row in rows_of()]
    drawn = [(x, i, j) for i, row in enumerate(rows) for j, x in enumerate(row["logprobs"])]
    for row in rows[:4]:  # where a token more is in the set, the others of the line share less
        row["trainer_logprobs"] = [x - 0.08 for x in row["trainer_logprobs"]]
    for _, line, place in sorted(drawn)[:cut]:
        rows[line]["trainer_logprobs"][place] = "-Infinity"
    report = audit_columns(write(tmp_path / "log.jsonl", rows))
    assert report.figures.outside.tokens == cut
    assert (report.cause.kind == "distribution") == named


@pytest.mark.parametrize("column", COLUMNS)
def test_a_column_of_nan_alone_is_a_fault_though_nothing_is_left_to_compare(tmp_path, capsys, column):
    rows = [row | {column: [math.nan] * len(row[column])} for row in rows_of()]
    log = write(tmp_path / "log.jsonl", rows)
    assert main(["audit", str(log), "--out", str(tmp_path / "out")]) == 1
    message = capsys.readouterr().err
    assert f"NaN in the {COLUMNS[column]}'s column" in message
    assert "480 of 480 drawn tokens" in message
    assert main(["audit", str(write(tmp_path / "other.jsonl", rows_of())), "--out", str(tmp_path / "o")]) == 0
