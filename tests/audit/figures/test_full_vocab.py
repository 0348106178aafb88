"""`zerokl audit --full_vocab`: the distributions of both engines, at every place of every completion."""

import json
import math

import numpy as np
import pytest
import torch
from zerokl.audit.conclusion.notes import full_vocab_note
from zerokl.audit.engines.engine import DISTRIBUTIONS, Engine, ZeroklEngine
from zerokl.audit.engines.hf import HfEngine
from zerokl.audit.figures.full_vocab import compare_full_vocab
from zerokl.cli import main
from zerokl.engine.rollout.types import Rollout
from zerokl.kernels.sampling_params import SamplingParams

PAIR = ((5, 6, 7), tuple(range(10, 16)))
WAYS = [SamplingParams(), SamplingParams(0.7, 0, 0.8), SamplingParams(0.0)]


class _Given:
    """An engine whose distributions are given: [C, V] fp32, in chunks of two places."""

    def __init__(self, logp: torch.Tensor):
        self.logp = logp

    def distributions(self, _pair: object, _params: object) -> tuple[torch.Tensor, ...]:
        return self.logp.split(2)


def _rollout(tokens: list[int]) -> tuple[Rollout, SamplingParams]:
    logp = np.zeros(len(tokens), np.float32)
    return Rollout.of_one_turn(0, 0, (1,), tuple(tokens), logp, "length", 0), SamplingParams()


def _logp(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log().float()


def test_figures_are_their_formulas():
    p = [[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.25, 0.5, 0.25]]
    q = [[0.5, 0.3, 0.2], [0.2, 0.1, 0.7], [0.5, 0.25, 0.25]]
    w = compare_full_vocab(_Given(_logp(p)), _Given(_logp(q)), [_rollout([0, 2, 1])])
    kl = [sum(a * math.log(a / b) for a, b in zip(x, y, strict=True)) for x, y in zip(p, q, strict=True)]
    back = [sum(b * math.log(b / a) for a, b in zip(x, y, strict=True)) for x, y in zip(p, q, strict=True)]
    assert w.kl_sampler_trainer.value == pytest.approx(sum(kl) / 3, rel=1e-6)
    assert w.kl_trainer_sampler.value == pytest.approx(sum(back) / 3, rel=1e-6)
    assert w.total_variation == pytest.approx((0 + 0.1 + 0.25) / 3, rel=1e-6)
    assert (w.places, w.vocabulary, w.frac_places_equal) == (3, 3, 1 / 3)
    assert w.frac_values_equal == pytest.approx(5 / 9)
    assert w.same_first == pytest.approx(2 / 3)
    assert w.max_abs == pytest.approx(math.log(2), rel=1e-6)
    assert (w.sequence, w.position, w.token) == (0, 1, 0)
    assert (w.same_rank, w.rank_change_max) == (pytest.approx(2 / 3), 1)


def test_an_error_of_the_mass_is_no_kl():
    p = _logp([[0.5, 0.3, 0.2]])
    w = compare_full_vocab(_Given(p), _Given(p + 1e-3), [_rollout([0])])
    assert w.mass_trainer - w.mass_sampler == pytest.approx(1e-3, rel=1e-2)
    assert 0 < w.kl_sampler_trainer.value < 1e-6


def test_tokens_that_one_side_cannot_draw_make_the_kl_infinite_and_are_counted():
    p, q = [[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]], [[1.0, 0.0, 0.0], [0.2, 0.3, 0.5]]
    w = compare_full_vocab(_Given(_logp(p)), _Given(_logp(q)), [_rollout([0, 2])])
    assert (w.infinite_kl, w.other_kept_set) == (1, 1)
    assert w.kl_sampler_trainer.value == 0.0, "over the place that is left"
    assert w.max_abs == pytest.approx(math.log(2), rel=1e-6), "of a token that both can draw"


@pytest.mark.parametrize("params", WAYS)
@pytest.mark.parametrize("engine", [ZeroklEngine, HfEngine])
def test_the_drawn_tokens_logprob_is_the_one_that_is_scored(model, engine, params):
    """The bits of score: the whole distribution is the one that the drawn token's logprob is of."""
    e: Engine = engine(model, torch.float32)
    logp = torch.cat(list(e.distributions(PAIR, params)))
    assert logp.shape == (6, 64)
    drawn = logp.gather(1, torch.tensor(PAIR[1]).unsqueeze(1)).squeeze(1).numpy()
    assert drawn.tobytes() == e.score([PAIR], params, together=False)[0].tobytes()
    assert torch.allclose(logp.double().exp().sum(dim=1), torch.ones(6, dtype=torch.float64), atol=1e-5)


def test_a_long_completion_comes_in_chunks(model):
    completion = tuple(10 + i % 40 for i in range(DISTRIBUTIONS + 3))
    chunks = list(ZeroklEngine(model, torch.float32).distributions((PAIR[0], completion), SamplingParams()))
    assert [len(x) for x in chunks] == [DISTRIBUTIONS, 3]


def test_a_difference_in_tokens_that_were_not_drawn_is_named():
    """SkyRL#2201: the drawn tokens agree to the bit, the distributions do not."""
    p = _logp([[0.5, 0.3, 0.2], [0.5, 0.25, 0.25]])
    q = p.clone()
    q[:, 1:] = q[:, 1:].flip(1) - 0.01
    w = compare_full_vocab(_Given(p), _Given(q), [_rollout([0, 0])])
    assert w.frac_places_equal == 0.0
    assert full_vocab_note(w, drawn_equal=True).endswith("The drawn tokens alone do not show this.")


def test_the_command_compares_the_whole_vocabulary(model, tmp_path, capsys):
    words = ["audit", str(model), "-n", "3", "--max-tokens", "5", "--full_vocab"]
    assert main([*words, "--sampler", "hf", "--dtype", "bfloat16", "--out", str(tmp_path / "hf")]) == 1
    vocab = json.loads((tmp_path / "hf" / "audit.json").read_text())["full_vocab"]
    assert vocab["places"] >= 3
    assert vocab["frac_values_equal"] < 1
    assert "Over the whole vocabulary, KL(sampler || trainer) is" in capsys.readouterr().out
    assert "The whole vocabulary" in (tmp_path / "hf" / "audit.html").read_text()
    assert main([*words, "--out", str(tmp_path / "native")]) == 0
    assert "The whole distributions are equal: 64 log-probabilities" in capsys.readouterr().out


def test_a_log_has_no_compare_full_vocab(model, tmp_path, capsys):
    (tmp_path / "log.jsonl").write_text("{}\n")
    words = ["audit", str(tmp_path / "log.jsonl"), "--model", str(model), "--full_vocab"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    assert "--full_vocab needs an engine as sampler" in capsys.readouterr().err
