"""Runs of PPO with a critic: exact, the same bits however they are cut, done again and gone on with."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean, variance

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM
from zerokl.cli import main
from zerokl.engine.runs.intact_checkpoints import checked_checkpoint
from zerokl.engine.runs.loaded import load_run
from zerokl.engine.runs.run import train
from zerokl.engine.train import prepare as preparing
from zerokl.engine.train.losses import critic
from zerokl.engine.train.parallel.scorer import Scorer
from zerokl.engine.train.state import TrainState
from zerokl.files.writing import write_manifest
from zerokl.model.weights import VALUE_HEAD_TENSOR

from tests.engine.runs.exact_runs import assert_done_again, first_gradient, first_state, train_exactly
from tests.helpers import assert_gradient_at_most_twice_the_error, randn

HALVES = ("bfloat16", "float16")


@pytest.fixture(scope="module")
def ppo(config):
    """ppo(**overrides): a run with a critic, of two updates a step, so that ratios and values move."""

    def make(**overrides):
        settings = {"loss__preset": "ppo", "steps": 4, "updates_per_rollout": 2, "loss__value_clip": 0.05}
        return config(**settings | {"loss__gamma": 0.9, "loss__gae_lambda": 0.8} | overrides)

    return make


@pytest.mark.parametrize("dtype", ["float32", *(pytest.param(x, marks=pytest.mark.full) for x in HALVES)])
def test_a_run_is_exact_and_is_done_again_to_the_bit(ppo, read_jsonl, tmp_path, dtype):
    path = tmp_path / "run"
    run = train_exactly(ppo(dtype=dtype, checkpoint__every=2), path)
    first, *_, last = read_jsonl(path / "metrics.jsonl")
    assert (first["critic/value_mean"], first["critic/explained_variance"]) == (0.0, 0.0)
    assert abs(last["critic/value_mean"]) > 0.01, "the head is trained"
    assert {"values", "targets"} < load_run(path).ledger.lines[0].quantities.keys()
    assert_done_again(run, path, ppo, dtype=dtype)


@pytest.mark.full
def test_every_setting_of_the_critic_shows_in_the_weights(ppo, tmp_path):
    changes = (
        {},
        {"gamma": 1.0},
        {"gae_lambda": 1.0},
        {"whiten": False},
        {"value_coef": 1.0},
        {"value_clip": 0},
    )
    settings = [{f"loss__{k}": v for k, v in change.items()} for change in changes]
    settings.append({"optimizer__critic_lr_ratio": 1.0})
    runs = [train(ppo(steps=3, **change), tmp_path / str(i)) for i, change in enumerate(settings)]
    assert len({run.weights for run in runs}) == len(settings)


@contextmanager
def _state(cfg) -> Iterator[tuple[TrainState, torch.Tensor]]:
    """The state of a run before its first step, with a head that is not zero; and the head."""
    with first_state(cfg) as state:
        head = state.policy.w["value_head"].detach()
        head.copy_(randn(0, *head.shape, scale=0.2))
        yield state, head


def _outputs(policy, head: torch.nn.Linear, rollout) -> tuple[torch.Tensor, torch.Tensor]:
    """logp and the values of the drawn tokens, by transformers and one linear layer."""
    out = policy(torch.tensor([rollout.ids]), output_hidden_states=True)
    ids, before = torch.tensor([rollout.ids])[:, 1:, None], np.flatnonzero(rollout.drawn) - 1
    logp = torch.log_softmax(out.logits[:, :-1], -1).gather(2, ids)[0, before, 0]
    return logp, head(out.hidden_states[-1])[0, before, 0]


def _advantages_of_sums(rewards: list[float], v: list[float], gamma: float, lam: float) -> list[float]:
    """GAE by its double sum."""
    C, next_v = len(v), [*v[1:], 0.0]
    delta = [r + gamma * n - x for r, n, x in zip(rewards, next_v, v, strict=True)]
    return [sum((gamma * lam) ** (k - c) * delta[k] for k in range(c, C)) for c in range(C)]


def test_the_gradient_is_that_of_transformers_and_a_linear_head_in_fp64(ppo):
    """Values, GAE, whitening and both losses are computed again, in fp64."""
    cfg = ppo(loss__value_clip=0.0)
    with _state(cfg) as (state, weight):
        batch, prepared, gradient = first_gradient(state, cfg)
    views, rewards = state.policy.layout.trained_views(gradient), batch.rewards.reshape(-1).tolist()

    def of_transformers(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        policy = Qwen3ForCausalLM.from_pretrained(cfg.model, dtype=dtype)
        policy.model.embed_tokens.padding_idx = None  # torch gives the padding token no gradient as an input
        head = torch.nn.Linear(len(weight), 1, bias=False, dtype=dtype)
        head.weight.data[0] = weight
        outputs = [_outputs(policy, head, r) for r in batch.rollouts]
        old = [v.detach().tolist() for _, v in outputs]
        A = [
            _advantages_of_sums([0.0] * (len(v) - 1) + [R], v, 0.9, 0.8)
            for v, R in zip(old, rewards, strict=True)
        ]
        flat = [a for row in A for a in row]
        mean, deviation, loss = fmean(flat), math.sqrt(variance(flat) + 1e-8), 0.0
        for (logp, v), row, old_v in zip(outputs, A, old, strict=True):
            advantages = torch.tensor(row, dtype=dtype)
            targets = advantages + torch.tensor(old_v, dtype=dtype)
            loss = loss - ((advantages - mean) / deviation * torch.exp(logp - logp.detach())).sum()
            loss = loss + 0.05 * ((v - targets) ** 2).sum()
        (loss / len(flat)).backward()
        named = dict(policy.named_parameters()) | {VALUE_HEAD_TENSOR: head.weight}
        return {name: w.grad.view(-1) for name, w in named.items() if w.grad is not None}

    exact, plain = of_transformers(torch.float64), of_transformers(torch.float32)
    assert exact.keys() == views.keys()
    assert_gradient_at_most_twice_the_error(views, plain, exact)
    assert abs(prepared.metrics["critic/value_mean"]) > 0.01


def test_turns_are_rewarded_at_their_last_tokens(ppo, tmp_path, monkeypatch):
    """In an environment, and with a cost of length: what is added comes at the end."""
    cfg = ppo(
        task__name="nim",
        task__options={},
        task__reward="",
        num_generations=2,
        prompts=4,
        loss__overlong_share=1.0,
    )
    seen, token_rewards = [], preparing.token_rewards

    def watched(drawn, turn_starts, turn_rewards, shaped):
        rewards = token_rewards(drawn, turn_starts, turn_rewards, shaped)
        seen.append((sum(turn_rewards), rewards, shaped))
        return rewards

    monkeypatch.setattr(preparing, "token_rewards", watched)
    train_exactly(cfg, tmp_path / "run")
    assert all(math.isclose(rewards.sum(), shaped, abs_tol=1e-12) for _, rewards, shaped in seen)
    assert any(shaped < plain for plain, _, shaped in seen)


def _shifted_targets(monkeypatch) -> None:
    """The targets of a rollout are those of the next token."""
    critic_of = critic.critic_of

    def shifted(rewards, values, cfg):
        made = critic_of(rewards, values, cfg)
        return made._replace(targets=[np.roll(target, -1) for target in made.targets])

    monkeypatch.setattr(preparing, "critic_of", shifted)


def test_control_shifted_targets_are_found_by_the_gradient(ppo, monkeypatch):
    _shifted_targets(monkeypatch)
    with pytest.raises(AssertionError, match="largest error"):
        test_the_gradient_is_that_of_transformers_and_a_linear_head_in_fp64(ppo)


def test_control_shifted_targets_are_found_by_a_replay(ppo, tmp_path, monkeypatch, capsys):
    train(ppo(), tmp_path / "run")
    _shifted_targets(monkeypatch)
    assert main(["replay", str(tmp_path / "run"), "--step", "1"]) == 1
    assert "targets" in capsys.readouterr().out


def test_values_of_another_row_stop_the_run(ppo, tmp_path, monkeypatch):
    values = Scorer.values

    def of_next_row(self, rollouts):
        return [np.roll(v, -1) for v in values(self, rollouts)]

    monkeypatch.setattr(Scorer, "values", of_next_row)
    with pytest.raises(
        RuntimeError, match=r"the critic's value at prompt 0, sample 0, position 0 is .* unequal"
    ):
        train(ppo(), tmp_path / "run")


def test_the_head_is_beside_the_model_in_a_checkpoint_and_is_checked(ppo, tmp_path):
    path = tmp_path / "run"
    train(ppo(), path)
    folder = path / "checkpoints" / "step-000004"
    assert VALUE_HEAD_TENSOR not in load_file(folder / "model.safetensors")
    Qwen3ForCausalLM.from_pretrained(folder)
    ledger = load_run(path).ledger
    assert VALUE_HEAD_TENSOR in ledger.head.names
    assert checked_checkpoint(folder, ledger)[0] is not None
    file = folder / "trainer" / "state.safetensors"
    state = load_file(file)
    assert state[VALUE_HEAD_TENSOR].any()
    for altered, message in (
        (state | {VALUE_HEAD_TENSOR: state[VALUE_HEAD_TENSOR].flip(0)}, "the weights in"),
        (
            {name: x for name, x in state.items() if name != VALUE_HEAD_TENSOR},
            f"holds no {VALUE_HEAD_TENSOR}",
        ),
        (state | {VALUE_HEAD_TENSOR: torch.zeros(3)}, f"{VALUE_HEAD_TENSOR} is of another model"),
    ):
        save_file(altered, file)
        (folder / "manifest.json").unlink()
        write_manifest(folder)
        assert message in checked_checkpoint(folder, ledger)[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_staleness": 1}, r"max_staleness \(1\): values are scored with the weights that were sampled"),
        ({"lora__rank": 4}, r"lora\.rank \(4\): the adapters have no critic's head"),
        (
            {"loss__max_resamples": 2},
            r"max_resamples and semantic_entropy: they compare the rewards of a group",
        ),
        ({"loss__semantic_entropy": 0.5}, r"max_resamples and semantic_entropy: they compare the rewards"),
        ({"loss__preset": "grpo"}, r"loss\.gamma \(.*\) is a critic's, and this loss has none"),
        (
            {"frozen": ["value_head.weight"]},
            r"frozen \('value_head.weight'\): matches no weight of the model",
        ),
    ],
)
def test_what_has_no_critic_is_refused(ppo, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train(ppo(**changes), tmp_path / "run")


@pytest.mark.full
def test_one_completion_of_a_prompt_and_frozen_weights_are_enough(ppo, tmp_path):
    cfg = ppo(num_generations=1, prompts=4, frozen=["model.embed_tokens.*", "model.layers.0.*"])
    train_exactly(cfg, tmp_path / "run")
