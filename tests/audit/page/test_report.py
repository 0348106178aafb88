"""What a report says: infinite ratios, negative estimates, assumptions, the cause, and hostile text."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.audit.as_json import as_json
from zerokl.audit.audit import audit
from zerokl.audit.conclusion.faults import not_drawn_from
from zerokl.audit.conclusion.outcome import Kind
from zerokl.audit.conclusion.verdict import parting
from zerokl.audit.engines.engine import ZeroklEngine
from zerokl.audit.figures.measure import Estimate, MeanRatio, measure
from zerokl.audit.page.numbers import distance
from zerokl.audit.page.page import level, page
from zerokl.cli import main
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import GenerationParams, RngKey, complete
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import load_decoder
from zerokl.pages.html import visible
from zerokl.verify.distance import ulp_words

from tests.audit.settings import audit_config
from tests.helpers import property_settings


def _write_log(model: Path, path: Path, drawn: SamplingParams, n: int = 12, **logged: float) -> None:
    """A log of n rollouts of the model; `logged` is what the log says that they were drawn with."""
    decoder = load_decoder(model, torch.float32)
    params = GenerationParams(drawn, n, 16, frozenset({1}))
    rollouts = complete(NativeSampler(decoder), [(5, 6, 7)], params, RngKey(0, 0))
    rows = [
        {"prompt_ids": r.prompt_ids, "completion_ids": r.completion_ids, "logprobs": r.logprobs.tolist()}
        | {"temperature": drawn.temperature, "top_p": drawn.top_p, "top_k": drawn.top_k}
        | logged
        for r in rollouts
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _report(model: Path, log: Path, out: Path) -> tuple[int, dict]:
    words = ["audit", str(model), "--sampler", str(log), "--dtype", "float32", "--out", str(out)]
    code = main(words)
    return code, json.loads((out / "audit.json").read_text(), parse_constant=_no_constant)


def _no_constant(name: str) -> None:
    raise AssertionError(f"audit.json holds {name}, which is not JSON")


# --- infinite ratios ---


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_tokens_outside_the_trainers_set_are_counted_and_said(model, tmp_path, capsys):
    """The sampler drew from all tokens; the log says that it drew from the ten likeliest."""
    _write_log(model, tmp_path / "log.jsonl", SamplingParams(), top_k=10)
    code, report = _report(model, tmp_path / "log.jsonl", tmp_path / "out")
    outside = report["outside"]
    assert code == 1
    assert 0 < outside["tokens"] < report["tokens"]
    assert outside["share"] == outside["tokens"] / report["tokens"]
    assert 0 < outside["mean_probability"] < 1
    assert math.isfinite(report["k3"]["value"])
    assert sum(row["left_out"] for row in report["by_position"]) == outside["tokens"]
    assert report["worst"][0]["trainer"] is None
    text = " ".join(capsys.readouterr().out.split())
    sentence = f"{outside['tokens']} of {report['tokens']} tokens lie outside the trainer's top-k set"
    assert sentence in text
    assert sentence in (tmp_path / "out" / "audit.html").read_text().replace("&#x27;", "'")
    assert report["cause"]["kind"] == "raw logits"


@pytest.mark.full
def test_no_tolerance_holds_with_an_infinite_kl(model, tmp_path):
    _write_log(model, tmp_path / "log.jsonl", SamplingParams(), top_k=10)
    log = str(tmp_path / "log.jsonl")
    result = audit(audit_config(str(model), log, dtype="float32", max_k3=1e9, max_abs=1e9))
    assert result.figures.outside.tokens > 0
    assert result.outcome.kind is Kind.BEYOND


_LOGPROBS = st.sampled_from([0.0, -0.0, -1e-7, -0.5, -2.0, -400.0, -800.0, -1e4, -3e38, -np.inf])


@property_settings(100)
@given(st.lists(st.lists(st.tuples(_LOGPROBS, _LOGPROBS), min_size=1, max_size=9), min_size=1, max_size=4))
@pytest.mark.filterwarnings("error")
def test_any_logprobs_give_json_and_no_warning(sequences):
    trainer, sampler = ([np.array([x[i] for x in s], np.float32) for s in sequences] for i in (0, 1))
    report = measure(trainer, sampler)
    again = json.loads(json.dumps(as_json(report), allow_nan=False))
    assert again["outside"]["tokens"] + again["infinite"]["tokens"] <= again["tokens"]
    assert (again["k3"]["value"] is None) == (
        again["outside"]["tokens"] + again["infinite"]["tokens"] == again["tokens"]
    )


# --- estimates that cannot be ---


@pytest.mark.full
def test_a_negative_kl_is_explained(model, tmp_path, capsys):
    """Drawn at temperature 0.2, but reported as if at 1: the logprobs are of another distribution."""
    _write_log(model, tmp_path / "log.jsonl", SamplingParams(0.2), n=24)
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    pairs = [(row["prompt_ids"], row["completion_ids"]) for row in rows]
    raw = ZeroklEngine(model, torch.float32).score(pairs, SamplingParams())
    lines = [json.dumps(row | {"logprobs": x.tolist()}) for row, x in zip(rows, raw, strict=True)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    code, report = _report(model, tmp_path / "log.jsonl", tmp_path / "out")
    assert code == 1
    assert report["k1"]["value"] < 0
    assert "a KL cannot be negative, so these log-probabilities are not of the distribution" in " ".join(
        capsys.readouterr().out.split()
    )
    assert report["cause"]["kind"] == "raw logits"
    assert "processed_logprobs" in report["cause"]["remedy"]


@pytest.mark.parametrize(
    ("k1", "error", "nats", "shown"),
    [
        (-0.041, 0.010, 14.0, True),
        (-0.039, 0.010, 14.0, False),  # within 4 standard errors
        (-0.041, 0.010, 13.9, False),  # by chance in one of a million logs, whatever the tails
        (0.5, 0.1, 14.0, False),
        (-1.0, math.nan, 14.0, False),
        (math.nan, math.nan, math.nan, False),
    ],
)
def test_a_negative_k1_needs_its_error_and_the_evidence(k1, error, nats, shown):
    figures = SimpleNamespace(k1=Estimate(k1, error), mean_ratio=MeanRatio(1.0, 0.1, nats))
    assert not_drawn_from(figures) is shown


# --- assumptions, positions, distances ---


def test_what_was_assumed_is_in_the_terminal_the_json_and_the_page(model, tmp_path, capsys):
    words = ["audit", str(model), "-n", "3", "--max-tokens", "4", "--temperature", "0.7", "--top-p", "0.9"]
    assert main([*words, "--seed", "5", "--dtype", "float32", "--out", str(tmp_path / "out")]) == 0
    assumed = json.loads((tmp_path / "out" / "audit.json").read_text())["assumed"]
    assert assumed["distributions"] == [{"temperature": 0.7, "top_k": 0, "top_p": 0.9, "rollouts": 3}]
    assert (assumed["seed"], assumed["max_tokens"], assumed["sampler_dtype"]) == (5, 4, "float32")
    assert {"torch", "transformers", "python", "numpy"} <= assumed["versions"].keys()
    terminal = " ".join(capsys.readouterr().out.split())
    for text in (terminal, (tmp_path / "out" / "audit.html").read_text()):
        assert "at temperature 0.7, top-p 0.9, top-k off" in text
        assert assumed["versions"]["torch"] in text


def test_positions_count_from_0(model):
    report = audit(audit_config(str(model), "hf", n=3, max_tokens=6))
    assert report.figures.by_position[0].first == 0
    assert "<td>position 0</td>" in page(report)
    assert "position 0: sampler" in page(report)


@pytest.mark.parametrize(
    ("ulp", "words", "cell"),
    [
        (None, "", "-"),
        (1, "1 representable number", "1"),
        (1 << 20, "1,048,576 representable numbers", "1,048,576"),
        ((1 << 20) + 1, "", "more than 2^20"),
    ],
)
def test_large_distances_are_not_printed(ulp, words, cell):
    assert ulp_words(ulp) == words
    assert distance(ulp) == cell


def test_where_a_distance_tells_nothing_the_size_is_said():
    first = {"op": "embed", "unequal": 3, "elements": 4, "max_ulp": 1 << 30, "relative": 0.25}
    trace = SimpleNamespace(first_divergence=SimpleNamespace(**first))
    words = parting(SimpleNamespace(trace=trace))
    assert words.endswith("3 of its 4 outputs differ, by 0.25 of their size.")


# --- text of a model ---


@property_settings(200)
@given(st.text())
def test_visible_text_prints_and_keeps_what_prints(text):
    shown = visible(text)
    assert shown.isprintable()
    assert visible(shown) == shown
    assert not text.isprintable() or shown == text


@pytest.mark.parametrize(
    ("sampler", "trainer", "colour"),
    [
        (-1.0, -1.0, 0),
        (None, None, 0),
        (-1.0, -1.00001, 1),
        (-1.0, -1.5, 5),
        (-1.0, -9.0, 6),
        (-1.0, None, 7),
    ],
)
def test_colours_grow_with_the_difference(sampler, trainer, colour):
    assert level(sampler, trainer) == level(trainer, sampler) == colour
