"""A run whose trainer gives some drawn tokens the probability 0: every reader of it reads it, as it was."""

import json
import math
import shutil
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import zerokl
from zerokl.audit.columns import audit_columns
from zerokl.audit.formats.fields import logprobs
from zerokl.audit.formats.record import is_logged_nan
from zerokl.cli import main
from zerokl.engine.config.config_file import load_config
from zerokl.engine.runs.report.payload import Source
from zerokl.engine.runs.run import train
from zerokl.files.reading import json_number, json_ready, parse_json
from zerokl.integrations.recorder import Recorder
from zerokl.verify.run_environment import PACKAGE_ROOT

from tests.random_model import ONE_LAYER, random_model


@pytest.fixture(scope="module")
def values(tmp_path_factory) -> dict[str, object]:
    """Settings of a run whose trainer cuts tokens that were drawn."""
    return {
        "model": str(random_model(tmp_path_factory.mktemp("model"), ONE_LAYER)),
        "steps": 2,
        "prompts": 2,
        "num_generations": 4,
        "exact": False,
        "sampling.temperature": 0.7,
        "sampling.top_p": 0.5,
        "sampling.max_tokens": 16,
        "perturb.round_weights": "bfloat16",
        "perturb.gain": 64.0,
        "task.options": {"max_value": 9, "train": 20, "held_out": 10},
        "evaluation.every": 0,
        "checkpoint.every": 1,
        "workers": 1,
        "threads": 1,
    }


@pytest.fixture(scope="module")
def run(values, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    train(load_config(None, None, values), path)
    return path


@pytest.mark.parametrize("cut", [{}, {"sampling.top_p": 1.0, "sampling.min_p": 0.3}], ids=["top_p", "min_p"])
def test_a_loss_of_infinities_of_both_signs_is_no_number_and_the_run_goes_on(values, tmp_path, cut):
    """kimi's surrogate is a logprob times an advantage, and advantages of a group have both signs."""
    kimi = {"loss.preset": "kimi", "task.reward": "toy:letters", "num_generations": 8}
    train(load_config(None, None, values | kimi | cut), tmp_path / "run")
    losses = zerokl.load_run(tmp_path / "run").metrics["loss"]
    assert len(losses) == 2
    assert all(map(math.isnan, losses))
    assert main(["verify", "run", str(tmp_path / "run")]) == 0


def _strict(text: str) -> object:
    """JSON as the standard has it."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


def test_load_run_gives_the_numbers_and_the_metrics_count_them(run):
    loaded = zerokl.load_run(run)
    rows = list(loaded.rollouts())
    trainer = [np.array(row["trainer_logprobs"]) for row in rows]
    assert np.concatenate(trainer).dtype == np.float64
    cut = sum(int(np.isneginf(x).sum()) for x in trainer)
    assert cut > 0, "the fixture must draw a token that the trainer cuts"
    tokens = loaded.metrics["tokens"]
    shares = loaded.metrics["mismatch/frac_outside"]
    assert round(sum(n * x for n, x in zip(tokens, shares, strict=True))) == cut
    assert all(math.isfinite(x) for x in loaded.metrics["mismatch/k3"])


def test_every_line_is_json_and_fits_the_schema(run):
    schema = json.loads((PACKAGE_ROOT / "audit/formats/log.schema.json").read_text())
    lines = [_strict(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert any("-Infinity" in line["trainer_logprobs"] for line in lines)
    for line in lines:
        jsonschema.validate(line, schema)


def test_report_diff_verify_and_audit_read_it(run, tmp_path, capsys):
    again = tmp_path / "again"
    shutil.copytree(run, again)
    assert main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 0
    assert main(["diff", str(run), str(again)]) == 0
    assert main(["diff", str(run / "rollouts.jsonl"), str(again / "rollouts.jsonl")]) == 0
    assert main(["verify", "run", str(run), "--replays", "1"]) == 0
    code = main(["audit", str(run / "rollouts.jsonl"), "--out", str(tmp_path / "audit")])
    assert code == 1
    report = _strict((tmp_path / "audit" / "audit.json").read_text())
    assert report["outside"]["tokens"] > 0
    capsys.readouterr()


def test_the_page_shows_an_infinite_difference(run):
    source = Source(run, "run")
    assert source.log.damage == ""
    (block,) = source.log.all_blocks()
    import gzip

    texts, index = (_strict(gzip.decompress(part).decode()) for part in (block.texts, block.index))
    assert "-Infinity" in [x for row in texts["differences"] if row for x in row]
    assert "Infinity" in index["mismatch"]


def test_a_wrong_first_rollout_is_still_named(run, tmp_path):
    """diff of two runs looks into rollouts.jsonl for the place of the first difference."""
    other = tmp_path / "other"
    shutil.copytree(run, other)
    lines = [json.loads(line) for line in (other / "rollouts.jsonl").read_text().splitlines()]
    place = next(i for i, line in enumerate(lines) if "-Infinity" in line["trainer_logprobs"])
    lines[place]["trainer_logprobs"] = [-1.0] * len(lines[place]["trainer_logprobs"])
    (other / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["diff", str(run / "rollouts.jsonl"), str(other / "rollouts.jsonl")]) == 1
    assert main(["verify", "run", str(other), "--replays", "2"]) == 1


def test_an_audit_of_rounded_columns_counts_an_infinite_difference(tmp_path):
    row = {"prompt_ids": [1], "completion_ids": [2, 3], "logprobs": [-0.5, -0.25], "decimals": 2}
    row |= {"temperature": 1.0, "top_p": 0.9}  # a cut may give a drawn token the probability 0
    file = tmp_path / "log.jsonl"
    file.write_text(json.dumps(row | {"trainer_logprobs": [-0.5, "-Infinity"], "trainer_decimals": 2}) + "\n")
    report = audit_columns(file)
    assert report.log.rounding.tokens_beyond == 1
    assert report.figures.outside.tokens == 1


def test_a_reader_hands_over_every_number_and_nothing_else():
    column = logprobs("logprobs", ["-Infinity", None, "NaN", -1e300, math.inf, 2.0], 6)
    assert column[[0, 4, 5]].tolist() == [-math.inf, math.inf, 2.0]
    assert np.isnan(column).tolist() == [False, True, True, False, False, False]
    assert is_logged_nan(column).tolist() == [False, False, True, False, False, False]
    assert np.isfinite(column[3])
    for value in ("x", True, [1.0], 10**400):
        with pytest.raises(ValueError, match="logprobs"):
            logprobs("logprobs", [value], 1)


def test_a_recorder_writes_what_its_readers_read(tmp_path):
    with Recorder(tmp_path / "log.jsonl", temperature=1.0, top_p=0.9) as recorder:
        recorder.record([1], [2, 3], [-0.5, -1.0], trainer_logprobs=[-math.inf, -1.0])
    assert audit_columns(tmp_path / "log.jsonl").figures.outside.tokens == 1


def test_what_json_has_no_number_for_comes_back():
    values = {"a": [1.5, math.inf, -math.inf, math.nan], "b": "Infinity of words", "c": None}
    read = parse_json(json.dumps(json_ready(values), allow_nan=False))
    assert json_number(read["a"])[:3] == values["a"][:3]
    assert math.isnan(json_number(read["a"])[3])
    assert json_number(read["b"]) == values["b"]
