"""`zerokl audit --batch_invariance N`: what an engine draws beside other requests and what it draws alone."""

import json

import numpy as np
import pytest
from zerokl.audit.as_json import as_json
from zerokl.audit.figures.batch_invariance import batch_invariance
from zerokl.cli import main
from zerokl.engine.rollout.types import GenerationParams, Rollout

PROMPTS = [(1, 2), (3,), (4, 5, 6)]
N = 11
OPTIONS = ["--max-tokens", "8", "-n", "6", "--batch_invariance", "9"]


class Drawn:
    """An engine whose tokens follow from the prompt, with a fault where `faulty` says so of a call."""

    def __init__(self, faulty=lambda call, prompts: False, stale=False):
        self.faulty, self.stale, self.calls, self.dropped = faulty, stale, 0, False

    def generate(self, prompts, generation_params: GenerationParams, seed: int) -> list[Rollout]:
        assert generation_params.sampling_params.temperature == 0.0
        self.calls += 1
        rollouts = []
        for i, prompt in enumerate(prompts):
            logprobs = -np.arange(1, 5, dtype=np.float32) / (1 + sum(prompt))
            if i == 1 and self.faulty(self.calls, prompts):
                logprobs[2] = np.nextafter(logprobs[2], 0)
            rollouts.append(Rollout.of_one_turn(i, 0, prompt, (7, 8, 9, 7), logprobs, "length", 0))
        return rollouts

    def drop_caches(self) -> bool:
        self.dropped = True
        return self.stale


def _report(engine: Drawn) -> dict:
    return as_json(batch_invariance(engine, PROMPTS, N, 4, frozenset(), 64))


def test_every_way_is_compared_and_equal_bits_are_equal():
    report = _report(Drawn(stale=True))
    assert report["unequal_from"] is None
    long = "11 at once beside 3 prefills of 60 tokens"
    assert [(row["way"], row["at_once"], row["compared"]) for row in report["rows"]] == [
        ("alone, again", 1, 3),
        ("2 at once", 2, 2),
        ("4 at once", 4, 4),
        ("8 at once", 8, 8),
        ("11 at once", 11, 11),
        ("11 at once, again", 11, 11),
        ("11 at once, caches dropped", 11, 11),
        (long, 14, 11),
    ]
    assert all(row["unequal"] == 0 and row["first"] is None for row in report["rows"])


@pytest.mark.parametrize(
    ("faulty", "first_way", "at_once"),
    [
        (lambda call, prompts: len(prompts) >= 8, "8 at once", 8),
        (lambda call, prompts: len(prompts) > N, "11 at once beside 3 prefills of 60 tokens", 14),
        (lambda call, prompts: call == 11, "11 at once, again", 11),
    ],
)
def test_the_first_way_that_differs_by_one_bit_is_named(faulty, first_way, at_once):
    report = _report(Drawn(faulty))
    row = next(row for row in report["rows"] if row["unequal"])
    assert (row["way"], report["unequal_from"], row["first"]) == (
        first_way,
        at_once,
        {"request": 1, "position": 2},
    )
    assert 0 < row["max_abs"] < 1e-6


def test_a_prompt_that_does_not_repeat_itself_is_named():
    class Chance(Drawn):
        def generate(self, prompts, generation_params, seed):
            rollouts = super().generate(prompts, generation_params, seed)
            for r in rollouts:
                r.logprobs[0] -= self.calls
            return rollouts

    assert _report(Chance())["unequal_from"] == 1


def test_a_token_that_differs_counts_and_what_follows_does_not():
    class Forked(Drawn):
        def generate(self, prompts, generation_params, seed):
            rollouts = super().generate(prompts, generation_params, seed)
            if len(prompts) == 2:
                r = rollouts[0]
                rollouts[0] = Rollout.of_one_turn(
                    0, 0, r.prompt_ids, (7, 1, 1, 1), r.logprobs - np.float32([0, 1, 1, 1]), "length", 0
                )
            return rollouts

    row = _report(Forked())["rows"][1]
    assert (row["unequal"], row["first"], row["max_abs"]) == (1, {"request": 0, "position": 1}, 0.0)


def test_the_native_sampler_draws_the_same_bits_in_any_company(model, tmp_path, capsys):
    assert main(["audit", str(model), *OPTIONS, "--out", str(tmp_path / "audit")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "native draws the same bits alone and with up to 9 requests at once." in shown
    report = json.loads((tmp_path / "audit" / "audit.json").read_text())["batch_invariance"]
    assert sum(row["compared"] for row in report["rows"]) == 9 + 2 + 4 + 8 + 3 * 9


def test_an_engine_that_depends_on_its_company_fails_the_audit(model, tmp_path, capsys, crowded_sampler):
    assert main(["audit", str(model), *OPTIONS, "--out", str(tmp_path / "audit")]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "native does not repeat its own bits, from 8 requests at once on" in shown
    assert "Likely cause: native is not batch-invariant" in shown


@pytest.mark.parametrize(
    ("requests", "message"), [("1", "must lie in 2 to 256"), ("257", "must lie in 2 to 256")]
)
def test_a_number_out_of_range_is_refused(model, tmp_path, capsys, requests, message):
    assert main(["audit", str(model), "--batch_invariance", requests, "--out", str(tmp_path / "audit")]) == 2
    assert "must lie in 2 to 256" in capsys.readouterr().err


def test_a_log_cannot_draw_again(model, tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    log.write_text(
        '{"prompt_ids": [1], "completion_ids": [2], "logprobs": [-1.0], "trainer_logprobs": [-1.0]}\n'
    )
    for words in ([], ["--model", str(model)]):
        assert (
            main(["audit", str(log), *words, "--batch_invariance", "4", "--out", str(tmp_path / "audit")])
            == 2
        )
        assert "a log cannot draw again" in capsys.readouterr().err
