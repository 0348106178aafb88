"""Columns that the tokens were not drawn from are named, and sound ones, however they round, are not.

The logs are drawn in numpy from random softmax distributions, one for each prefix of each prompt.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from zerokl.audit.columns import audit_columns
from zerokl.audit.conclusion.verdict import verdict
from zerokl.audit.figures.drawn_from import Distribution, check
from zerokl.audit.figures.measure import evidence
from zerokl.audit.figures.repeats import Drawn, masses, repeats
from zerokl.audit.page.page import page
from zerokl.cli import main
from zerokl.kernels.sampling_params import SamplingParams as P
from zerokl.verify.mismatch import standard_error

VOCAB, RAW = 48, P()
MIN_P, ALLOWED = P(1.0, 0, 1.0, 0.1), P.of(allowed_token_ids=range(0, 48, 2))


def distribution(logits: np.ndarray, params: P) -> np.ndarray:
    p = np.exp((logits - logits.max()) / params.temperature)
    p /= p.sum()
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    likely = p[order] >= params.min_p * p.max()
    keep = order[likely & (before < params.top_p) & (np.arange(len(p)) < (params.top_k or len(p)))]
    if params.allowed_token_ids is not None:
        keep = np.intersect1d(keep, params.allowed_token_ids)
    kept = np.zeros_like(p)
    kept[keep] = p[keep]
    return kept / kept.sum()


def draw(
    seed: int,
    drawn: P,
    sampler: P,
    trainer: P,
    noise: float = 0.0,
    shape: tuple[int, int, int] = (8, 8, 10),
    scale: float = 3.0,
) -> list[Drawn]:
    """Completions of prompts (shape: prompts, completions of each, tokens) with columns under other params.

    noise: of the trainer's logits, as rounding or other weights make it. scale: of the logits.
    """
    rng, rollouts = np.random.default_rng(seed), []
    for prompt in range(shape[0]):
        logits: dict[tuple, np.ndarray] = {}
        for _ in range(shape[1]):
            ids, rows = [], []
            for _ in range(shape[2]):
                z = logits.setdefault(tuple(ids), rng.normal(0, scale * rng.uniform(0.3, 1.5), VOCAB))
                token = int(rng.choice(VOCAB, p=distribution(z, drawn)))
                noisy = z + noise * rng.normal(size=VOCAB)
                rows.append((distribution(z, sampler)[token], distribution(noisy, trainer)[token]))
                ids.append(token)
            with np.errstate(divide="ignore"):
                s, t = np.log(np.array(rows)).T.astype(np.float32)
            rollouts.append(Drawn(prompt, np.array(ids), np.arange(len(ids)), s, t, drawn))
    return rollouts


def kind(rollouts: list[Drawn]) -> str | None:
    fault = check(rollouts).fault
    return fault and fault.kind


@pytest.mark.parametrize("noise", [0.0, 1e-6, 0.01])
@pytest.mark.parametrize(
    ("drawn", "sampler", "trainer", "name"),
    [
        (P(1.0, 0, 0.95), P(1.0, 0, 0.95), RAW, "trainer without top-p"),
        (P(0.8, 0, 0.9), P(0.8, 0, 0.9), P(0.8), "trainer without top-p"),
        (P(1.0, 5), P(1.0, 5), RAW, "trainer without top-k"),
        (P(0.8), P(0.8), RAW, "trainer without the temperature"),
        (P(0.8, 0, 0.95), P(0.8, 0, 0.95), RAW, "trainer without the temperature"),
        (P(1.5), P(1.5), RAW, "trainer without the temperature"),
        (P(0.8), RAW, P(0.8), "sampler without the temperature"),
        (P(1.0, 0, 0.9), RAW, P(1.0, 0, 0.9), "sampler without top-p"),
        (MIN_P, MIN_P, RAW, "trainer without min-p"),
        (ALLOWED, ALLOWED, RAW, "trainer without allowed tokens"),
        (P(0.5), P(0.7), P(0.5), "distribution"),
    ],
)
def test_a_column_of_another_distribution_is_named(drawn, sampler, trainer, name, noise):
    assert kind(draw(0, drawn, sampler, trainer, noise)) == name


def test_a_cut_that_no_line_declares_is_named_from_its_sign_alone():
    rollouts = draw(0, P(1.0, 0, 0.9), P(1.0, 0, 0.9), RAW)
    undeclared = [Drawn(x.group, x.ids, x.positions, x.sampler, x.trainer, None) for x in rollouts]
    assert kind(undeclared) == "trainer without top-p, top-k or min-p"


def test_a_trainer_of_more_than_the_whole_mass_blames_no_sampler():
    """Log-probabilities over their completion's length look far more likely than the sampler's."""
    sound = draw(0, RAW, RAW, RAW, 0.01)
    over = [x._replace(params=None, trainer=x.trainer / np.float32(len(x.trainer))) for x in sound]
    assert check(over).mean_ratio.evidence > 1000
    assert kind(over) is None
    assert sum(x > 1.1 for x in masses(over)) > 0.5 * len(masses(over))
    assert max(masses(sound)) < 1.05, "control"
    assert kind(draw(0, P(1.0, 0, 0.9), RAW, P(1.0, 0, 0.9))) == "sampler without top-p", "control"


def test_one_number_for_all_tokens_is_no_cut():
    rollouts = draw(0, RAW, RAW, RAW, 0.001)
    halved = [x._replace(params=None, sampler=x.sampler - np.float32(math.log(2))) for x in rollouts]
    assert kind(halved) == "distribution"


def sound_logs(count: int):
    rng = np.random.default_rng(5)
    for seed in range(count):
        params = P(
            *(rng.choice(x).item() for x in ([0.3, 0.6, 0.8, 1.0, 1.5], [0, 0, 5], [1.0, 1.0, 0.95, 0.8]))
        )
        noise = rng.choice([0.0, 1e-6, 1e-3, 0.01, 0.03, 0.1, 1.0])
        shape = tuple(rng.choice(x).item() for x in ([1, 2, 8], [1, 2, 8], [3, 10]))
        scale = rng.choice([0.5, 2.0, 4.0, 8.0])
        yield (params, noise, shape, scale), draw(seed, params, params, params, noise, shape, scale)


def test_no_sound_log_is_called_a_fault():
    """From equal bits to other weights (noise 1, whose ratios have heavy tails), any length and entropy."""
    alarms = {settings: fault for settings, log in sound_logs(60) if (fault := kind(log))}
    assert alarms == {}


@pytest.mark.slow
def test_no_sound_log_of_many_is_called_a_fault():
    alarms = {settings: fault for settings, log in sound_logs(1500) if (fault := kind(log))}
    assert alarms == {}


def test_rare_tokens_that_were_not_drawn_are_no_fault():
    """1,000 tokens of probability 0.999, all drawn: a mean ratio below or above 1 without any spread."""
    for trainer in (0.99, 0.9999999):
        s, t = (np.full(10, math.log(p), np.float32) for p in (0.999, trainer))
        ids = np.zeros(10, int)
        log = [Drawn(i // 4, ids, np.arange(10), s, t, RAW) for i in range(100)]
        assert check(log).fault is None, trainer


def test_greedy_tokens_are_passed_over():
    log = [Drawn(0, x.ids, x.positions, x.sampler, x.trainer, P(0.0)) for x in draw(0, P(0.2), RAW, P(0.2))]
    assert check(log) == Distribution(0)


def test_repeats_show_two_equal_columns_of_another_distribution():
    shape = (64, 8, 6)
    for declared, name in ((P(0.7), "distribution"), (P(1.0, 0, 0.8), "distribution"), (RAW, None)):
        log = draw(3, declared, RAW, RAW, shape=shape)
        assert kind(log) == name, declared
    fault = check(draw(3, P(0.7), RAW, RAW, shape=shape)).fault
    assert (
        "drawn from a sharper distribution than the sampler's column, and so neither column is" in fault.text
    )


def test_the_error_of_repeats_covers_what_sound_logs_scatter():
    z = []
    for seed in range(40):
        seen = repeats(draw(seed, RAW, RAW, RAW, shape=(6, 6, 4), scale=2.0))
        z.append((seen.same - seen.expected) / seen.standard_error)
    assert np.mean(z) == pytest.approx(0.0, abs=0.5)
    assert np.std(z) <= 1.2


# --- standard errors and evidence ---


def test_the_standard_error_covers_correlated_tokens():
    """Tokens that share half of their variance with their sequence. Independent tokens would cover 40%."""
    rng, lengths, inside, naive = np.random.default_rng(0), [25] * 40, 0, 0
    for _ in range(300):
        x = np.repeat(rng.normal(size=40), lengths) + rng.normal(size=1000)
        inside += abs(x.mean()) <= 1.96 * standard_error(x, lengths)
        naive += abs(x.mean()) <= 1.96 * x.std(ddof=1) / math.sqrt(1000)
    assert 0.91 <= inside / 300 <= 0.98
    assert naive / 300 < 0.6


def test_one_sequence_has_the_error_of_independent_tokens():
    x = np.random.default_rng(0).normal(size=50)
    assert standard_error(x, [50]) == pytest.approx(x.std(ddof=1) / math.sqrt(50))
    assert math.isnan(standard_error(x[:1], [1]))


def test_evidence_keeps_its_promise_for_heavy_tails():
    """r is 1000 in one of 1000 tokens and 0 elsewhere: E[r] = 1. exp(-x) bounds the chance of x nats."""
    rng = np.random.default_rng(0)
    nats = np.array([evidence(1000.0 * (rng.random(300) < 0.001)) for _ in range(2000)])
    for x in (1.0, 2.0, 3.0):
        assert (nats >= x).mean() <= math.exp(-x)
    assert evidence(np.full(300, 1.1)) > 14.0, "control: a ratio that is always above 1"


# --- what the command says ---


def write_log(path: Path, log: list[Drawn], **more) -> Path:
    rows = [
        {"prompt_ids": [x.group + 1], "completion_ids": x.ids.tolist(), "logprobs": x.sampler.tolist()}
        | {"trainer_logprobs": x.trainer.tolist()}
        | ({"temperature": x.params.temperature, "top_p": x.params.top_p} if x.params else {})
        | more
        for x in log
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_fault_is_the_same_in_terminal_json_and_page(tmp_path, capsys):
    log = write_log(tmp_path / "log.jsonl", draw(0, P(1.0, 0, 0.95), P(1.0, 0, 0.95), RAW))
    assert main(["audit", str(log), "--out", str(tmp_path / "out")]) == 1
    report = json.loads((tmp_path / "out" / "audit.json").read_text())
    fault = report["distribution"]["found"]
    assert [report["cause"][name] for name in ("kind", "text")] == [fault["kind"], fault["text"]]
    assert report["cause"]["suspicion"]
    assert report["cause"]["remedy"].startswith("Confirm it with --model")
    assert "not the smaller one in 640 of 640 tokens" in report["cause"]["text"]
    assert "0.0513 at most (-log 0.95 is 0.0513)" in report["cause"]["text"]
    ratio = report["mean_ratio"]
    assert ratio["value"] < 1.0 - 4 * ratio["standard_error"]
    terminal = " ".join(capsys.readouterr().out.split())
    assert report["cause"]["text"] in terminal
    assert "± is the standard error of a mean over tokens" in terminal
    assert report["cause"]["text"][1:].replace("'", "&#x27;") in (tmp_path / "out" / "audit.html").read_text()


def test_a_named_fault_is_read_last_and_hypotheses_that_explain_nothing_are_left_out(tmp_path, capsys):
    def audited(name: str, trainer: P, noise: float) -> tuple[list[str], str]:
        log = write_log(tmp_path / f"{name}.jsonl", draw(0, P(0.8), P(0.8), trainer, noise))
        assert main(["audit", str(log), "--out", str(tmp_path / name)]) == 1
        return capsys.readouterr().out.splitlines(), (tmp_path / name / "audit.html").read_text()

    lines, shown = audited("named", RAW, 0.0)
    cause_line = next(i for i, line in enumerate(lines) if line.startswith("Suspicion, without a model: "))
    assert "the trainer's column is without the temperature" in " ".join(lines[cause_line:])
    assert not [line for line in lines[cause_line:] if line.startswith("A correction with the bound")]
    assert [line for line in lines[:cause_line] if line.startswith("A correction with the bound")]
    assert "would explain" not in " ".join(lines) + shown
    lines, shown = audited("unknown", P(0.8), 0.5)
    assert "would explain" in " ".join(lines), "control: no cause is known"
    assert "would explain" in shown


def test_equal_columns_are_no_proof_and_the_page_says_so(tmp_path):
    shape = (8, 1, 10)  # one completion of each prompt: nothing repeats
    report = audit_columns(write_log(tmp_path / "log.jsonl", draw(0, P(0.8), RAW, RAW, shape=shape)))
    assert report.cause.kind == "equal columns"
    for text in (verdict(report), page(report)):
        assert "no proof that the tokens were drawn from this distribution" in text
        assert "they were drawn at temperature 0.8" in text
        assert "--model" in text
        assert "Nothing is to be done" not in text


def test_the_mean_ratio_is_the_first_figure_and_few_tokens_have_no_percentiles(tmp_path):
    report = audit_columns(write_log(tmp_path / "log.jsonl", draw(0, RAW, RAW, RAW, 0.01, shape=(2, 3, 10))))
    assert page(report).index("<td>mean ratio</td>") < page(report).index("<td>tokens</td>")
    assert list(report.figures.abs_percentiles) == ["50", "90"], (
        "6 tokens lie beyond p90, and none beyond p99"
    )
