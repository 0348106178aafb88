"""What sound draws look like beside a model, and what the drawn tokens show that no column does."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from zerokl.audit.audit import audit
from zerokl.audit.conclusion.verdict import headline
from zerokl.audit.faults.draws import one_stream, undeclared_cut
from zerokl.audit.hypotheses.evidence import Evidence
from zerokl.audit.hypotheses.logits import Rows
from zerokl.audit.hypotheses.noise import Noise, pairs
from zerokl.audit.hypotheses.scorable_lines import Line
from zerokl.audit.page.rows import hypothesis_rows, key_rows
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.truncation import scaled_logits
from zerokl.model.checkpoint import load_decoder

from tests.audit.hypotheses.planted import draw, report_of, scores, write
from tests.audit.settings import audit_config

V = 64


def rows(params: SamplingParams, seed: int = 0, lines: int = 24, sure: int = 0) -> Rows:
    """Lines that are drawn with some parameters, and declare temperature 1.

    sure: places at each beginning at which one token is all but certain, and the same in all lines.
    """
    generator, logits, drawn = torch.Generator().manual_seed(seed), {}, []
    for i in range(lines):
        z = torch.randn(40, V, generator=generator) * 2.0
        z[:sure, 5] += 12.0
        p = torch.softmax(scaled_logits(z, params), 1)
        ids = torch.multinomial(p, 1, generator=generator).squeeze(1)
        logp = torch.log_softmax(z, 1).gather(1, ids.unsqueeze(1)).squeeze(1).numpy()
        drawn.append(Line(i, (i // 4,), tuple(ids.tolist()), logp, logp, SamplingParams()))
        logits[i] = z
    return Rows(Evidence(drawn), logits)


@pytest.mark.parametrize(
    ("words", "params"),
    [
        ("top-p of about 0.9", SamplingParams(1.0, 0, 0.9)),
        ("top-k of about 10", SamplingParams(1.0, 10)),
        ("min-p of about 0.0", SamplingParams(1.0, 0, 1.0, 0.05)),
        ("top-k of about 1,", SamplingParams(1.0, 1)),
    ],
)
def test_a_cut_that_neither_column_has_is_named(words, params):
    assert words in undeclared_cut.look(rows(params))


def test_whole_and_flatter_and_sharper_distributions_are_no_cut():
    for seed in range(20):
        assert undeclared_cut.look(rows(SamplingParams(), seed)) is None
    for temperature in (0.5, 0.6, 0.85, 1.2):
        assert undeclared_cut.look(rows(SamplingParams(temperature))) is None


def test_a_cut_is_named_beside_the_model_and_equal_columns(case, tmp_path):
    rollouts = draw(case.decoder, SamplingParams(1.0, 0, 0.8), each=12)
    logged = scores(case.decoder, rollouts, SamplingParams())
    uncut = [replace(r, logprobs=x) for r, x in zip(rollouts, logged, strict=True)]
    report = report_of(case, write(tmp_path / "log.jsonl", uncut, SamplingParams()))
    assert report["outcome"]["faults"][0] == "drawn with a cut that is not declared"
    whole = draw(case.decoder, SamplingParams(), each=12)
    assert report_of(case, write(tmp_path / "whole.jsonl", whole, SamplingParams()))["outcome"]["passed"]


def test_lines_with_the_same_sure_beginning_share_no_random_stream():
    for seed in range(5):
        assert one_stream.look(rows(SamplingParams(), seed, sure=37)) is None


def test_rounding_is_named_by_the_side_that_rounds_more():
    sizes = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}
    noises = {name: Noise(name, size) for name, size in sizes.items()}
    assert {x.dtype for x in pairs("bfloat16", noises)} == {"bfloat16"}
    assert [x.dtype for x in pairs("float32", noises)] == list(sizes)


@pytest.mark.full
def test_a_stack_in_float32_is_sound_beside_a_model_in_bfloat16(case, tmp_path):
    numbers = [x.logprobs for x in case.rollouts]
    log = write(tmp_path / "log.jsonl", case.rollouts)
    assert report_of(case, log, "bfloat16")["cause"]["kind"] == "another dtype"
    both = _with_trainer(log, numbers)
    report = report_of(case, both, "bfloat16")
    assert (report["outcome"]["kind"], report["cause"]["kind"]) == ("sound", "rounding")
    assert "float32" in report["cause"]["text"]
    trained_in_bf16 = _with_trainer(log, scores(load_decoder(case.folder, torch.bfloat16), case.rollouts))
    assert report_of(case, trained_in_bf16, "bfloat16")["cause"]["kind"] == "another dtype"


def _with_trainer(log, columns):
    """The log with a trainer's column, beside it."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    rows = [x | {"trainer_logprobs": np.asarray(y).tolist()} for x, y in zip(rows, columns, strict=True)]
    path = log.with_name(f"{len(list(log.parent.iterdir()))}.jsonl")
    path.write_text("".join(json.dumps(x) + "\n" for x in rows))
    return path


def test_headline_figures_and_table_speak_of_the_columns_that_the_fault_is_of(case, tmp_path):
    """A sound sampler beside the model, and a trainer without the temperature."""
    raw = scores(case.decoder, case.rollouts, SamplingParams())
    log = _with_trainer(write(tmp_path / "log.jsonl", case.rollouts), raw)
    report = audit(audit_config(str(case.folder), str(log), "zerokl", "float32"))
    largest = max(float(np.abs(r.logprobs - x).max()) for r, x in zip(case.rollouts, raw, strict=True))
    assert report.cause.trainer_column
    assert report.figures.max_abs < 1e-3 < largest
    assert report.shown.figures.max_abs == pytest.approx(largest, rel=1e-5)
    assert f"the largest difference of a log-probability is {largest:.3g}" in headline(report)
    assert dict(row[:2] for row in key_rows(report))["largest difference"] == f"{largest:.3g}"
    assert f"{abs(report.shown.worst[0].trainer - report.shown.worst[0].sampler):.3g}" == f"{largest:.3g}"
    first = hypothesis_rows(report)[0][0]
    assert first.endswith(" (fits)")
    assert first.removesuffix(" (fits)") in report.cause.kind
