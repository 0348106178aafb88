"""Runs of VeriFree: exact, the same bits however they are cut, done again and gone on with, and learning."""

import math
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM
from zerokl.engine.runs.checks.logged_steps import read_step, rollouts_fault
from zerokl.engine.runs.loaded import load_run
from zerokl.engine.runs.report.rollouts import RolloutLog
from zerokl.engine.runs.run import train
from zerokl.engine.tasks.tokenizer import Tokenizer
from zerokl.engine.train.monitor import MismatchError

from tests.engine.runs.exact_runs import (
    assert_done_again,
    assert_gradient_of_transformers,
    first_gradient,
    first_state,
    train_exactly,
)

PREFIX = ">="


@pytest.fixture(scope="module")
def verifree(config):
    """verifree(**overrides): a run on sums, with reasonings of at most 6 tokens that end where > is drawn."""

    def make(**overrides):
        settings = {"loss__preset": "verifree", "task__answer_prefix": PREFIX, "task__reward": "", "steps": 4}
        return config(**settings | {"sampling__max_tokens": 6, "num_generations": 4} | overrides)

    return make


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float32", marks=pytest.mark.proof),
        "bfloat16",
        pytest.param("float16", marks=pytest.mark.full),
    ],
)
def test_a_run_is_exact_learns_and_is_done_again_to_the_bit(verifree, read_jsonl, tmp_path, dtype):
    path = tmp_path / "run"
    run = train_exactly(verifree(dtype=dtype, checkpoint__every=2, evaluation__every=4), path)
    first, *_, last = [m["verifree/answer_logp"] for m in read_jsonl(path / "metrics.jsonl")]
    assert last > first + 1.0
    assert_done_again(run, path, verifree, dtype=dtype)
    longer = train(verifree(dtype=dtype, task__answer_prefix=">=:"), tmp_path / "prefix")
    assert longer.weights != run.weights, "control: the prefix must show"


def test_the_log_has_the_parts_of_each_trajectory_and_the_advantages_of_their_tokens(
    verifree, read_jsonl, tmp_path
):
    cfg = verifree(steps=3, num_generations=8)
    train(cfg, tmp_path / "run")
    rollouts = read_jsonl(tmp_path / "run" / "rollouts.jsonl")
    tokenizer = Tokenizer(Path(cfg.model), 64)
    ends = set()
    for i in range(0, len(rollouts), 8):
        group = rollouts[i : i + 8]
        for r in group:
            ids, mask, start = r["completion_ids"], r["mask"], r["turn_starts"][1] - len(r["prompt_ids"])
            a, b = map(int, r["prompt_text"].rstrip("=").split("+"))
            assert tokenizer.text(ids[start:]) == f"{a + b}<eos>"
            ended = tokenizer.text(ids[:start]).endswith(PREFIX)
            assert ended
            drawn = mask[:start].index(0)
            ends.add(tokenizer.text(ids[drawn - 1 : drawn]) if drawn < 6 else "length")
            assert mask == [1] * drawn + [0] * (start - drawn) + [1] * (len(ids) - start)
            assert start - drawn == (1 if ids[drawn - 1] == tokenizer.encode_plain(">")[0] else 2)
            logp = r["logprobs"][start:]
            assert r["reward"] == math.exp(math.fsum(logp))
            others = [x["reward"] for x in group if x is not r]
            A = r["advantage"]
            assert A[drawn:start] == [None] * (start - drawn)
            assert A[start:] == [r["reward"]] * len(logp)
            assert len(set(A[:drawn])) == 1
            assert A[0] == pytest.approx(r["reward"] - sum(others) / 7, rel=1e-9, abs=1e-18)
    assert {"length"} < ends, "a reasoning must be cut, and another one ended by itself"
    log = RolloutLog(tmp_path / "run" / "rollouts.jsonl")
    log.read()
    assert (log.damage, log.rows) == ("", len(rollouts)), "the report reads a list of advantages"


def test_a_score_of_other_bits_stops_the_run(verifree, tmp_path, plant_score):
    plant_score(5)
    with pytest.raises(MismatchError, match=r"prompt 1, sample 1, position \d .* 1 ulp apart; 1 of"):
        train(verifree(), tmp_path / "run")


def test_an_advantage_in_the_log_that_is_another_is_found(verifree, read_jsonl, tmp_path):
    path = tmp_path / "run"
    train(verifree(steps=1), path)
    lines, (ledger_line,) = read_jsonl(path / "rollouts.jsonl"), load_run(path).ledger.lines
    assert rollouts_fault(read_step(lines, 4), ledger_line) is None
    lines[5]["advantage"][-1] *= 2.0
    fault = rollouts_fault(read_step(lines, 4), ledger_line)
    assert fault == "step 0: the advantages are not those whose hash is in the ledger"
    lines[5]["advantage"][-1] = None
    with pytest.raises(
        ValueError, match="advantage is no list of numbers, with null for each token that was"
    ):
        read_step(lines, 4)


def test_the_gradient_is_that_of_transformers_in_fp64(verifree):
    """The product rule on the whole model: R and the baseline are computed again, in fp64."""
    cfg = verifree()
    with first_state(cfg) as state:
        batch, _, gradient = first_gradient(state, cfg)

    def loss(policy: Qwen3ForCausalLM) -> torch.Tensor:
        total = torch.zeros((), dtype=policy.dtype)
        for p in range(cfg.prompts):
            parts = [log_probabilities(policy, r) for r in batch.rollouts[4 * p : 4 * p + 4]]
            R = [answer.exp().item() for _, answer in parts]
            for (reasoning, answer), r in zip(parts, R, strict=True):
                total = total - (r - (sum(R) - r) / 3) * reasoning - r * answer
        return total / (cfg.prompts * 4 * cfg.sampling.max_tokens)

    views = state.policy.layout.checkpoint_views(gradient)
    assert_gradient_of_transformers(views, cfg.model, loss)


def log_probabilities(policy, rollout) -> tuple[torch.Tensor, torch.Tensor]:
    """log pi of the drawn reasoning, and of the answer after the prefix."""
    ids = torch.tensor([rollout.ids])
    logp = torch.log_softmax(policy(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
    drawn, answer = torch.from_numpy(rollout.drawn[1:].copy()), rollout.turn_starts[1] - 1
    return logp[:answer][drawn[:answer]].sum(), logp[answer:].sum()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task__reward": "exact"}, r"task\.reward \(exact\) with task\.answer_prefix: the probability"),
        ({"task__name": "nim", "task__options": {}}, r"task\.answer_prefix: task nim has no answer"),
        ({"task__answer_prefix": "\u2603"}, r"has a character that the tokenizer does not know"),
        (
            {"sampling__max_tokens": 5000},
            r"problem 0 has \d tokens, and \d of answer prefix and answer; with",
        ),
    ],
)
def test_what_cannot_be_scored_is_refused(verifree, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train(verifree(**changes), tmp_path / "run")
