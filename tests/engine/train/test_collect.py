"""Whole runs with dynamic sampling, with a KL term to a reference, and with every kind of loss."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from zerokl.cli import main
from zerokl.engine.config.config_file import to_toml
from zerokl.engine.rollout.episodes import CompletionPlayer, Episodes
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.stopwatch import Stopwatch
from zerokl.engine.rollout.types import GenerationParams, RngKey, Rollout, complete
from zerokl.engine.runs.run import train
from zerokl.engine.tasks.base import Problem
from zerokl.engine.tasks.environment import ERROR, TIME_LIMIT
from zerokl.engine.tasks.equivalence import Equivalence
from zerokl.engine.tasks.rewards import Reward
from zerokl.engine.tasks.tokenizer import Tokenizer
from zerokl.engine.train.collect import collect, step_problems
from zerokl.engine.train.parallel.scorer import frozen
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import load_decoder
from zerokl.model.checkpoint_writing import write_checkpoint

from tests.helpers import total_unequal
from tests.presets import DRAWN_PRESETS

SEVERAL_UPDATES = dict(updates_per_rollout=3, steps=2)


QUICK = ("pg", "dapo")


@pytest.mark.parametrize(
    "preset",
    [*QUICK, *(pytest.param(name, marks=pytest.mark.full) for name in DRAWN_PRESETS if name not in QUICK)],
)
def test_micro_batches_and_workers_change_no_bit_of_any_loss(config, tmp_path, preset):
    """With several updates on the same rollouts, so that ratios of tokens and of sequences differ from 1."""
    runs = [
        train(config(loss__preset=preset, **SEVERAL_UPDATES, micro_batch=n), tmp_path / str(n))
        for n in (64, 1, 2)
    ]
    assert len({run.fingerprint for run in runs}) == 1
    assert {(run.tokens_unequal, run.mismatch_max_abs) for run in runs} == {(0, 0.0)}


@pytest.mark.full
def test_control_presets_train_differently(config, tmp_path):
    """Except for presets that differ in the correction of a mismatch only: the mismatch is zero here."""
    weights = {
        p: train(config(loss__preset=p, **SEVERAL_UPDATES), tmp_path / p).weights for p in DRAWN_PRESETS
    }
    assert weights["grpo"] == weights["tis"] == weights["mis"] == weights["mis_token"] == weights["icepop"]
    assert len(set(weights.values())) == len(DRAWN_PRESETS) - 4


def test_a_surrogate_of_the_users_own_is_what_trains(config, tmp_path):
    users = train(
        config(loss__preset="grpo", loss__surrogate="toy:ppo", **SEVERAL_UPDATES), tmp_path / "users"
    )
    clip = train(config(loss__preset="grpo", **SEVERAL_UPDATES), tmp_path / "clip")
    unbounded = train(config(loss__preset="grpo", loss__bound="none", **SEVERAL_UPDATES), tmp_path / "none")
    assert (users.weights, users.mismatch_max_abs) == (clip.weights, 0.0)
    assert users.fingerprint != clip.fingerprint, "the name of a surrogate is a setting that decides bits"
    assert users.weights != unbounded.weights, "control: the bound must show"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("toy:half", "returned a value of"),
        ("toy:alone", "must return two tensors"),
        ("toy:raises", "raised KeyError"),
        ("toy:nan", "returned a slope that is NaN"),
        ("toy:nowhere", "cannot be imported"),
        ("nowhere:f", "cannot be imported"),
    ],
)
def test_a_surrogate_that_does_not_fit_is_refused(config, tmp_path, name, reason):
    with pytest.raises(ValueError, match=f"loss.surrogate: {name} {reason}"):
        train(config(loss__surrogate=name), tmp_path / "run")


class _Uneven:
    """Rewards that differ within a group for the problems `differ` only."""

    def __init__(self, differ: set[int]):
        self.differ, self.calls = differ, 0

    def __call__(self, problem: Problem, completion: str) -> float:
        self.calls += 1
        return float(problem.id in self.differ and self.calls % 2)


@pytest.fixture
def collected(config, model):
    """collected(max_resamples, differ, step): what a step collects when only `differ` have uneven rewards."""
    decoder = load_decoder(model, torch.float32)
    tokenizer, sampler = Tokenizer(model, 64), NativeSampler(decoder)
    problems = [Problem(i, f"{i}+1=", str(i + 1)) for i in range(9)]

    def run(max_resamples: int, differ: set[int], step: int = 0):
        state = SimpleNamespace(
            config=config(prompts=3, num_generations=4, loss__max_resamples=max_resamples),
            generation_params=GenerationParams(SamplingParams(), 4, 4, tokenizer.stop_ids),
            step=step,
            sampler=sampler,
            player=CompletionPlayer(tokenizer, Reward(_Uneven(differ)), chat=False),
            problems=problems,
            equivalence=None,
            ahead=None,
        )
        return collect(state)

    return run


def test_only_completions_that_are_trained_on_have_a_class(config):
    ends = [["stop", ERROR, "stop", "stop"], ["stop", "stop", "length", TIME_LIMIT]]
    texts = [["7", "8", " 7", "9"], ["", " ", "x", "x"]]
    problems, one = [Problem(0, "1=", "1"), Problem(1, "2=", "2")], np.zeros(1, np.float32)
    rollouts = [Rollout.of_one_turn(p, g, (1,), (2,), one, ends[p][g], 0) for p in (0, 1) for g in range(4)]
    episodes = Episodes(problems, rollouts, texts, np.zeros((2, 4)))
    state = SimpleNamespace(
        config=config(prompts=2, num_generations=4),
        step=0,
        problems=problems,
        sampler=None,
        generation_params=None,
        player=SimpleNamespace(players=1, play=lambda *_: episodes),
        equivalence=Equivalence(),
        ahead=None,
        stopwatch=Stopwatch(torch.device("cpu")),
    )
    assert collect(state).classes == [[0, 0, 2], [0, 0, 2]]


def test_dynamic_sampling_draws_until_enough_groups_differ(collected):
    order = step_problems(9, 9, 0, 0)
    differ = {order[1], order[4], order[5], order[8]}
    batch = collected(4, differ)
    assert [p.id for p in batch.problems] == [order[1], order[4], order[5]]
    assert batch.groups_drawn == 6, "the second draw suffices"
    assert [r.prompt for r in batch.rollouts[::4]] == [1, 4, 5]
    assert [r.sample for r in batch.rollouts[:4]] == [0, 1, 2, 3]


def test_groups_without_difference_fill_up_what_the_draws_did_not_find(collected):
    order = step_problems(9, 9, 0, 0)
    batch = collected(2, {order[4]})
    assert [p.id for p in batch.problems] == [order[0], order[1], order[4]]
    assert (batch.groups_drawn, batch.rewards.shape) == (6, (3, 4))


def test_without_dynamic_sampling_every_group_is_kept(collected):
    for step in range(3):
        batch = collected(1, set(), step)
        assert [p.id for p in batch.problems] == step_problems(9, 3, 0, step)
        assert batch.groups_drawn == 3


def test_rollouts_do_not_depend_on_the_draw_they_are_collected_in(collected):
    """Prompt 4 of the step has the random numbers of place 4, whichever groups are kept beside it."""
    order = step_problems(9, 9, 0, 0)
    batch, larger = collected(2, {order[4]}), collected(4, {order[4], order[0]})
    completions = [r.completion_ids for r in batch.rollouts[8:12]]
    assert completions == [r.completion_ids for r in larger.rollouts if r.prompt == 4]


@pytest.mark.full
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_the_kl_term_holds_the_policy_near_its_reference(config, tmp_path, read_jsonl, kl_in):
    summaries = {}
    for coef in (0.0, 1.0):
        kind = "k3" if kl_in == "loss" else "k1"
        cfg = config(
            steps=8, loss__kl_coef=coef, loss__kl=kind, loss__kl_in=kl_in, loss__ref_model=config().model
        )
        summaries[coef] = train(cfg, tmp_path / str(coef))
        lines = read_jsonl(tmp_path / str(coef) / "metrics.jsonl")
        assert ("ref/k3" in lines[0]) == bool(coef)
    (first, *_, last) = lines
    assert first["ref/max_abs"] == 0.0, "the reference is the first model, scored with the same bits"
    assert last["ref/k3"] > 0
    base = load_decoder(config().model, torch.float32)
    without_kl, with_kl = (
        load_decoder(tmp_path / coef / "checkpoints" / "step-000008", torch.float32)
        for coef in ("0.0", "1.0")
    )
    assert (with_kl.flat - base.flat).norm() < (without_kl.flat - base.flat).norm()
    again = train(cfg.model_copy(update={"micro_batch": 2, "workers": 2}), tmp_path / "again")
    assert again.fingerprint == summaries[1.0].fingerprint


def test_a_reference_of_another_vocabulary_is_refused(config, tmp_path, capsys):
    model, reference = config().model, tmp_path / "reference"
    decoder = load_decoder(model, torch.float32)
    write_checkpoint(reference, decoder.layout, decoder.flat.detach(), companions=None)
    raw = json.loads((reference / "config.json").read_text())
    (reference / "config.json").write_text(json.dumps(raw | {"vocab_size": 65}))
    (tmp_path / "c.toml").write_text(to_toml(config(loss__kl_coef=1.0, loss__ref_model=reference)))
    assert main(["train", str(tmp_path / "c.toml"), "--run_dir", str(tmp_path / "run")]) == 2
    assert "has a vocabulary of 65, the model one of 64" in capsys.readouterr().err


@pytest.mark.parametrize("n", [1, 2])
def test_a_scorer_gives_the_samplers_bits(model, n):
    decoder = load_decoder(model, torch.bfloat16)
    generation_params = GenerationParams(SamplingParams(0.8, 0, 0.95), 2, 9, frozenset({1}))
    rollouts = complete(NativeSampler(decoder), [[3, 4], [5], [6, 7, 8]], generation_params, RngKey(0, 0))
    scorer = frozen(load_decoder(model, torch.bfloat16), 4, n, 4)
    try:
        scores = scorer.score(rollouts, generation_params.sampling_params)
    finally:
        scorer.close()
    drawn = [torch.from_numpy(r.logprobs) for r in rollouts]
    assert total_unequal([torch.from_numpy(x) for x in scores], drawn) == 0
