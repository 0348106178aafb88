"""Runs of DPO: exact, the same bits however they are cut, done again and gone on with, and learning."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM
from zerokl.engine.runs.run import resume, train
from zerokl.engine.tasks.loading import load_task
from zerokl.engine.train.losses.dpo import margins
from zerokl.engine.train.monitor import MismatchError

from tests.engine.runs.exact_runs import (
    assert_done_again,
    assert_gradient_of_transformers,
    first_gradient,
    first_state,
    train_exactly,
)
from tests.random_model import TWO_LAYERS, random_model

BETA = 0.5


@pytest.fixture(scope="module")
def dpo(config, tmp_path_factory):
    """dpo(**overrides): a run over pairs, of 2 to 7 tokens. A chosen one is a sum, a rejected one is none."""
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [
        {"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{a}{'xyz'[b % 3]}{'no' * (a % 3)}"}
        for a in range(6)
        for b in range(4)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"file": str(file), "held_out": 4, "chat": False}

    def make(**overrides):
        settings = {"task__name": "pairs", "task__options": options, "task__reward": "", "steps": 4}
        settings |= {"loss__preset": "dpo", "loss__beta": BETA, "num_generations": 2, "optimizer__lr": "3e-3"}
        return config(**settings | overrides)

    return make


def losses(path: Path, read_jsonl) -> list[float]:
    return [line["dpo/loss"] for line in read_jsonl(path / "metrics.jsonl")]


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float32", marks=pytest.mark.proof),
        "bfloat16",
        pytest.param("float16", marks=pytest.mark.full),
    ],
)
def test_a_run_is_exact_learns_and_is_done_again_to_the_bit(dpo, read_jsonl, tmp_path, dtype):
    path = tmp_path / "run"
    run = train_exactly(dpo(dtype=dtype, checkpoint__every=2), path)
    first, *_, last = losses(path, read_jsonl)
    assert first == pytest.approx(np.log(2), rel=1e-15), "the reference is the first model"
    assert last < 0.8 * first
    assert_done_again(run, path, dpo, dtype=dtype)
    other_beta = train(dpo(dtype=dtype, loss__beta=0.25), tmp_path / "beta")
    assert other_beta.weights != run.weights, "control: beta must show"


def test_the_log_has_both_completions_and_their_advantages(dpo, read_jsonl, tmp_path):
    train(dpo(evaluation__every=2), tmp_path / "run")
    rollouts = read_jsonl(tmp_path / "run" / "rollouts.jsonl")
    assert len(rollouts) == 4 * 3 * 2
    for chosen, rejected in zip(rollouts[::2], rollouts[1::2], strict=True):
        a, b = map(int, chosen["prompt_text"].rstrip("=").split("+"))
        assert chosen["text"] == str(a + b)
        assert rejected["text"] == f"{a}{'xyz'[b % 3]}{'no' * (a % 3)}"
        assert {chosen["completion_ids"][-1], rejected["completion_ids"][-1]} == {1}, "the stop token"
        assert chosen["advantage"] == -rejected["advantage"] > 0
        assert (
            chosen["reward"]
            == rejected["reward"]
            == float(sum(chosen["logprobs"]) > sum(rejected["logprobs"]))
        )
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert all(0 <= m["eval/accuracy"] <= 1 for m in metrics[1::2])


def test_another_rejected_completion_is_other_data(dpo, tmp_path):
    """Of a pair that no step takes: the head of the ledger has the hash of all pairs."""
    file = tmp_path / "p.jsonl"
    rows = [{"prompt": f"{i}=", "chosen": "yes", "rejected": "no"} for i in range(20)]

    def write() -> None:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write()
    cfg = dpo(task__options={"file": str(file), "chat": False}, steps=1, checkpoint__every=1, prompts=1)
    train(cfg, tmp_path / "run")
    (taken,) = {json.loads(x)["problem"] for x in (tmp_path / "run" / "rollouts.jsonl").open()}
    texts = [p.prompt for p in load_task("pairs", cfg.task.options).problems("train")]
    rows[next(i for i, row in enumerate(rows) if row["prompt"] != texts[taken])]["rejected"] = "never"
    write()
    with pytest.raises(ValueError, match="resume: the training problems are not those of the run"):
        resume(tmp_path / "run", {"steps": "2"})


def test_a_score_of_other_bits_stops_the_run(dpo, tmp_path, plant_score):
    plant_score(3)
    with pytest.raises(MismatchError, match=r"prompt 1, sample 1, position 0 .* 1 ulp apart; 1 of"):
        train(dpo(), tmp_path / "run")


def test_the_gradient_is_that_of_transformers_in_fp64(dpo, tmp_path):
    """-log sigmoid(m) of the whole model, with another model as the reference, so that no margin is 0."""
    reference = random_model(tmp_path, TWO_LAYERS, sharper=1.5)
    cfg = dpo(loss__ref_model=reference)
    with first_state(cfg) as state:
        batch, prepared, gradient = first_gradient(state, cfg)
    A = prepared.advantages.values
    assert len({abs(a) for a in A.reshape(-1).tolist()}) == 3, "margins differ, so their advantages do"

    def loss(policy: Qwen3ForCausalLM) -> torch.Tensor:
        ref, losses = Qwen3ForCausalLM.from_pretrained(reference, dtype=policy.dtype), []
        for chosen, rejected in zip(batch.rollouts[::2], batch.rollouts[1::2], strict=True):
            m = BETA * (log_ratio(policy, ref, chosen) - log_ratio(policy, ref, rejected))
            losses.append(-torch.nn.functional.logsigmoid(m))
        return torch.stack(losses).mean()

    views = state.policy.layout.checkpoint_views(gradient)
    assert_gradient_of_transformers(views, cfg.model, loss)


def log_ratio(policy, ref, rollout) -> torch.Tensor:
    """log policy - log ref of a completion."""
    ids, n = torch.tensor([rollout.ids]), len(rollout.completion_ids)

    def logp(model) -> torch.Tensor:
        rows = torch.log_softmax(model(ids).logits[0, -n - 1 : -1], -1)
        return rows.gather(1, ids[0, -n:, None]).sum()

    with torch.no_grad():
        ref_logp = logp(ref)
    return logp(policy) - ref_logp


def test_margins_follow_from_the_log_of_two_steps(dpo, read_jsonl, tmp_path):
    """The reference is the first model, so the log-probabilities of a pair at step 0 are the reference's."""
    train(dpo(steps=9, prompts=4), tmp_path / "run")
    rollouts = read_jsonl(tmp_path / "run" / "rollouts.jsonl")
    seen: dict[tuple, list[np.ndarray]] = {}
    for chosen, rejected in zip(rollouts[::2], rollouts[1::2], strict=True):
        logprobs = [np.array(r["logprobs"], np.float32) for r in (chosen, rejected)]
        if chosen["step"] == 0:
            seen[chosen["prompt_text"]] = logprobs
        elif chosen["prompt_text"] in seen:
            (m,) = margins(logprobs, seen[chosen["prompt_text"]], BETA)
            assert chosen["advantage"] == pytest.approx(BETA / (1 + np.exp(m)), rel=1e-14)
            return
    raise AssertionError("no pair of step 0 came again")
