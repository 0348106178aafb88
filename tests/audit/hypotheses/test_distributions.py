"""A log of another distribution is named; a sound log names nothing."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from zerokl.audit.audit import audit
from zerokl.audit.faults.all_faults import predicted_count, with_model
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import load_decoder

from tests.audit.hypotheses.planted import (
    CUT,
    RAW,
    changed_weights,
    draw,
    perturbed,
    relogged,
    report_of,
    scores,
    write,
)
from tests.audit.settings import audit_config


@pytest.mark.parametrize("trainer", ["zerokl", "hf"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sound_log_names_none(case, tmp_path, trainer, dtype):
    drawn = draw(load_decoder(case.folder, getattr(torch, dtype)), CUT)
    other = changed_weights(case, tmp_path / "other", perturbed)
    report = report_of(case, write(tmp_path / "log.jsonl", drawn, CUT), dtype, trainer, other)
    assert report["hypotheses"]["found"] is None
    assert report["log_findings"] == []
    assert (report["frac_equal"] == 1.0) == (trainer == "zerokl")
    assert report["cause"]["kind"] == ("equal" if trainer == "zerokl" else "rounding")


@pytest.mark.full
@pytest.mark.parametrize("trainer", ["zerokl", "hf"])
def test_a_sound_log_of_every_filter_names_none(case, tmp_path, trainer):
    params = SamplingParams.of(0.8, 30, 0.95, 0.02, {5: 2.0, 20: -1.5}, range(3, 60))
    report = report_of(
        case, write(tmp_path / "log.jsonl", draw(case.decoder, params), params), trainer=trainer
    )
    assert report["hypotheses"]["found"] is None
    assert (report["frac_equal"] == 1.0) == (trainer == "zerokl")
    (drawn_with,) = report["assumed"]["distributions"]
    assert drawn_with == {
        "temperature": 0.8,
        "top_k": 30,
        "top_p": 0.95,
        "rollouts": 8,
        "min_p": 0.02,
        "biased_tokens": 2,
        "allowed_tokens": 57,
    }


def test_allowed_tokens_that_the_logprobs_leave_out_are_named(case, tmp_path):
    declared = SamplingParams.of(1.0, allowed_token_ids=range(3, 40))
    drawn = draw(case.decoder, declared)
    logged = relogged(drawn, scores(case.decoder, drawn, RAW))
    named = report_of(case, write(tmp_path / "log.jsonl", logged, declared))["hypotheses"]["found"]
    assert named["name"] == "raw logits"


def test_a_fault_that_no_row_knows_fits_none(case, tmp_path):
    noise = np.random.default_rng(0)
    logged = [np.minimum(r.logprobs + noise.normal(0, 0.3, len(r.logprobs)), 0.0) for r in case.rollouts]
    report = report_of(case, write(tmp_path / "log.jsonl", relogged(case.rollouts, logged)))
    assert report["hypotheses"]["found"] is None
    tried = report["hypotheses"]["tried"]
    assert tried > predicted_count(), "where none fits, the numbers at operations are tried, too"
    assert report["cause"]["kind"] == "unknown"
    assert f"none of {tried} hypotheses fits" in report["cause"]["text"]


def _tried(case, log) -> set[str]:
    """The hypotheses that an audit says it tries."""
    stages, before = [], "trying what may explain it: "
    audit(audit_config(str(case.folder), str(log), dtype="float32"), stages.append)
    return {words.removeprefix(before) for words in stages if words.startswith(before)}


@pytest.mark.full
def test_what_leaves_rounding_alone_ends_the_searches_and_nothing_less_does(case, tmp_path):
    """Searches take minutes with a real vocabulary; where a simple cause is the whole of it, nobody waits."""
    costly = {fault.name for fault in with_model() if not (fault.is_at_once or fault.is_of_whole_log)}
    costly -= {"another temperature"}
    declared, real = RAW, SamplingParams(0.6)
    drawn = draw(case.decoder, real)
    logged = [x.astype(np.float64) for x in scores(case.decoder, drawn, real)]
    settled = _tried(case, write(tmp_path / "settled.jsonl", relogged(drawn, logged), declared))
    assert {"another temperature", "off by one"} <= settled
    assert not settled & costly
    noise = np.random.default_rng(0)
    noisy = [np.minimum(x + noise.normal(0, 0.1, len(x)), 0.0) for x in logged]
    left = _tried(case, write(tmp_path / "left.jsonl", relogged(drawn, noisy), declared))
    assert costly <= left


def test_the_side_at_fault_is_named(case, tmp_path):
    """The sampler's numbers are of the top-p set; the trainer's own column is over the whole vocabulary."""
    drawn = draw(case.decoder, CUT)
    log = write(tmp_path / "log.jsonl", drawn, CUT)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    whole = scores(case.decoder, drawn, SamplingParams(0.7))
    rows = [row | {"trainer_logprobs": x.tolist()} for row, x in zip(rows, whole, strict=True)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = report_of(case, log)
    assert report["frac_equal"] == 1.0, "the sampler's column is the model's"
    assert report["cause"]["kind"] == "the log's trainer column, top-p and top-k not renormalised"
    assert report["trainer_column"]["found"]["name"] == "top-p and top-k not renormalised"
    assert any("The log's trainer column differs" in note for note in report["notes"])


def test_the_checkpoints_generation_config_is_named(case, tmp_path):
    folder = changed_weights(case, tmp_path / "model", lambda flat: flat)
    (folder / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1}'
    )
    drawn = draw(case.decoder, SamplingParams(0.6, 20, 0.95, 0.1))
    report = report_of(replace(case, folder=folder), write(tmp_path / "log.jsonl", drawn, RAW))
    assert report["hypotheses"]["found"]["name"] == "generation_config.json"
    assert "top_k 20" in report["cause"]["text"]


def test_a_trainer_column_without_top_p_is_named_beside_the_model(case, tmp_path):
    """In bf16 it is within rounding of the model's; beside the sampler's column it is not."""
    params = SamplingParams(1.0, 0, 0.95)
    rollouts = draw(case.decoder, params, each=12)
    log = write(tmp_path / "log.jsonl", rollouts, params)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    columns = {"sound": scores(case.decoder, rollouts, params), "uncut": scores(case.decoder, rollouts, RAW)}
    notes = {}
    for name, column in columns.items():
        lines = [row | {"trainer_logprobs": x.tolist()} for row, x in zip(rows, column, strict=True)]
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
        notes[name] = " ".join(report_of(case, log, "bfloat16")["notes"])
    assert "The log's trainer column is the model's, to within rounding." in notes["sound"]
    assert "trainer column is the model's, to within rounding" not in notes["uncut"]
    assert "the trainer's column is without the sampler's top-p" in notes["uncut"]


def _beside_model(case, path, column, count: int = 48) -> dict:
    """The report on a sound sampler's column beside a trainer's: `count` lines, or one of 3 tokens."""
    rollouts = draw(case.decoder, RAW, each=12)
    rows = [json.loads(line) for line in write(path, rollouts, RAW).read_text().splitlines()][:count]
    if count == 1:
        rows[0] |= {name: rows[0][name][:3] for name in ("completion_ids", "logprobs")}
    lines = [row | {"trainer_logprobs": column(row["logprobs"])} for row in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return report_of(case, path)


@pytest.mark.usefixtures("without_knobs")
def test_a_trainer_lacks_no_cut_that_the_model_shows_the_sampler_not_to_have(case, tmp_path):
    """Every other number is too low: one sign, as of a missing cut. But the sampler's are the model's."""
    report = _beside_model(
        case, tmp_path / "log.jsonl", lambda x: [v - 0.7 * (i % 2) for i, v in enumerate(x)]
    )
    assert report["trainer_column"]["distribution"]["found"] is None
    assert "top-p" not in report["cause"]["text"]
    assert report["outcome"]["faults"] == ["the log's trainer column"]


@pytest.mark.full
@pytest.mark.usefixtures("without_knobs")
@pytest.mark.parametrize("lines", [1, 48])
def test_a_trainer_column_that_no_hypothesis_explains_is_a_fault(case, tmp_path, lines):
    """The sampler's column is the model's, bit for bit. One line of 3 tokens fits no hypothesis."""
    noise = np.random.default_rng(0)
    report = _beside_model(
        case,
        tmp_path / "log.jsonl",
        lambda x: np.subtract(x, noise.uniform(0.2, 0.9, len(x))).tolist(),
        lines,
    )
    assert report["frac_equal"] == 1.0
    assert report["outcome"]["faults"] == ["the log's trainer column"]
    assert bool(report["trainer_column"]["rows"]) is (lines == 48)


def test_a_trainer_column_of_nan_alone_is_not_the_models(case, tmp_path):
    report = _beside_model(case, tmp_path / "log.jsonl", lambda x: [math.nan] * len(x))
    assert report["outcome"]["faults"] == ["NaN in the trainer's column"]
    assert "trainer_column" not in report
    assert not any("trainer column is the model's" in note for note in report["notes"])
