"""Runs of BRPO: reasonings cut at budgets, and answers. They are exact, and done again to the bit."""

import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM
from zerokl.cli import main
from zerokl.engine.rollout.budgets import BudgetPlayer
from zerokl.engine.runs.checks.logged_steps import read_step, rollouts_fault
from zerokl.engine.runs.loaded import load_run
from zerokl.engine.runs.report.rollouts import RolloutLog
from zerokl.engine.runs.run import train
from zerokl.engine.tasks.tokenizer import Tokenizer
from zerokl.engine.train.monitor import MismatchError
from zerokl.engine.train.parallel.scorer import WorkersSampler

from tests.engine.runs.exact_runs import (
    assert_done_again,
    assert_gradient_of_transformers,
    first_gradient,
    first_state,
    train_exactly,
)

PREFIX, BUDGETS, WEIGHTS, ANSWERS = ">=", [1, 3, 6], [0.5, 0.0, 1.5], 2
G, M = 3, len(BUDGETS)
S = G * (1 + M * ANSWERS)
HALVES = ("bfloat16", "float16")


@pytest.fixture(scope="module")
def brpo(config):
    """brpo(**overrides): reasonings of at most 6 tokens, which end where > is drawn, and short answers."""

    def make(**overrides):
        settings = {"loss__preset": "brpo", "task__answer_prefix": PREFIX, "loss__budgets": BUDGETS}
        settings |= {"loss__budget_weights": WEIGHTS, "loss__answers": ANSWERS, "prompts": 2, "steps": 3}
        settings |= {"sampling__max_tokens": 6, "sampling__answer_max_tokens": 4}
        return config(**settings | overrides)

    return make


@pytest.mark.parametrize("dtype", ["float32", *(pytest.param(x, marks=pytest.mark.full) for x in HALVES)])
def test_a_run_is_exact_and_is_done_again_to_the_bit(brpo, read_jsonl, tmp_path, dtype):
    """Two updates a step, so that ratios move; held-out answers at each budget."""
    path, settings = tmp_path / "run", {"dtype": dtype, "updates_per_rollout": 2, "evaluation__every": 3}
    run = train_exactly(brpo(**settings, checkpoint__every=2), path)
    last = read_jsonl(path / "metrics.jsonl")[-1]
    at_budgets = [last[f"eval/reward_at_{b}"] for b in BUDGETS]
    mean = (0.5 * at_budgets[0] + 1.5 * at_budgets[2]) / 2
    assert last["eval/reward"] == pytest.approx(mean, rel=1e-12)
    assert_done_again(run, path, brpo, **settings)


@pytest.mark.full
def test_every_setting_shows_in_the_weights(brpo, tmp_path):
    changes = (
        {},
        {"loss__budgets": [2, 3, 6]},
        {"loss__budget_weights": []},
        {"loss__answers": 3},
        {"sampling__answer_max_tokens": 3},
        {"task__answer_prefix": ">"},
    )
    runs = [train(brpo(steps=2, **change), tmp_path / str(i)) for i, change in enumerate(changes)]
    assert len({run.weights for run in runs}) == len(changes)


def check_log(rollouts: list[dict], tokenizer: Tokenizer) -> set[int]:
    """Each answer follows the first tokens of its reasoning. Returns the lengths of the reasonings."""
    prefix, lengths = tuple(tokenizer.encode_plain(PREFIX)), set()
    for i in range(0, len(rollouts), S):
        prompt, answers = rollouts[i : i + S], iter(rollouts[i + G : i + S])
        rewards = []
        for g, thought in enumerate(prompt[:G]):
            ids = thought["completion_ids"]
            lengths.add(len(ids))
            means = []
            for budget in BUDGETS:
                cut_answers = [next(answers) for _ in range(ANSWERS)]
                rest = prefix[1:] if len(ids) <= budget and ids[-1] == prefix[0] else prefix
                for r in cut_answers:
                    assert (r["reasoning"], r["budget"]) == (g, budget)
                    assert r["prompt_ids"] == [*thought["prompt_ids"], *ids[:budget], *rest]
                    assert r["text"] == tokenizer.decode(r["completion_ids"])
                    assert r["reward"] == sum(map(str.isalpha, r["text"])) / 8
                means.append(fmean(r["reward"] for r in cut_answers))
            rewards.append((0.5 * means[0] + 1.5 * means[2]) / 2)
            assert "budget" not in thought
        assert [thought["reward"] for thought in prompt[:G]] == pytest.approx(rewards, rel=1e-14)
    return lengths


@pytest.fixture(scope="module")
def logged(brpo, read_jsonl, tmp_path_factory) -> tuple[Path, list[dict], Tokenizer]:
    path, cfg = tmp_path_factory.mktemp("logged") / "run", brpo(num_generations=G)
    train(cfg, path)
    return path, read_jsonl(path / "rollouts.jsonl"), Tokenizer(Path(cfg.model), 64)


def test_the_log_has_reasonings_and_the_answers_after_their_cuts(logged, brpo):
    path, rollouts, tokenizer = logged
    lengths = check_log(rollouts, tokenizer)
    assert 6 in lengths, "a reasoning must be cut"
    assert lengths & {2, 4, 5}, "and another one must end by itself between two budgets"
    log = RolloutLog(path / "rollouts.jsonl")
    log.read()
    assert (log.damage, log.rows) == ("", len(rollouts))
    cuts, (ledger_line, *_) = brpo().loss.cuts(G), load_run(path).ledger.lines
    lines = rollouts[: 2 * S]
    assert rollouts_fault(read_step(lines, S, cuts), ledger_line) is None
    lines[G + 1] = lines[G + 1] | {"reward": lines[G + 1]["reward"] + 0.125}
    fault = rollouts_fault(read_step(lines, S, cuts), ledger_line)
    assert fault == "step 0: the rewards are not those whose hash is in the ledger"


def test_a_line_that_names_another_budget_is_found(logged, tmp_path, capsys):
    path = shutil.copytree(logged[0], tmp_path / "run")
    file = path / "rollouts.jsonl"
    file.write_text(file.read_text().replace('"budget": 3', '"budget": 1', 1))
    assert main(["verify", "run", str(path), "--replays", "0"]) == 1
    assert "budget is 1, and its tokens give 3" in capsys.readouterr().out


def test_control_a_cut_that_is_one_token_off_is_found(
    brpo, logged, read_jsonl, tmp_path, monkeypatch, capsys
):
    """By the log, and by the replay of a run without the fault."""
    requests = BudgetPlayer._requests

    def one_off(self, reasoning, cuts, params, rng_key):
        late = cuts._replace(budgets=tuple(b + 1 for b in cuts.budgets))
        return requests(self, reasoning, late, params, rng_key)

    monkeypatch.setattr(BudgetPlayer, "_requests", one_off)
    assert main(["replay", str(logged[0]), "--step", "0"]) == 1
    assert "prompts" in capsys.readouterr().out
    train(brpo(num_generations=G, steps=1), tmp_path / "run")
    with pytest.raises(AssertionError):
        check_log(read_jsonl(tmp_path / "run" / "rollouts.jsonl"), logged[2])


def test_a_logprob_of_an_answer_that_is_one_bit_off_stops_the_run(brpo, tmp_path, monkeypatch):
    generate = WorkersSampler.generate

    def one_bit_off(self, requests):
        completions = generate(self, requests)
        if len(requests) > 2 * G:  # those of the answers
            logprobs = completions[7].logprobs.copy()
            logprobs.view(np.int32)[0] ^= 1
            completions[7] = replace(completions[7], logprobs=logprobs)
        return completions

    monkeypatch.setattr(WorkersSampler, "generate", one_bit_off)
    with pytest.raises(MismatchError, match=rf"prompt 0, sample {G + 7}, position 0 .* 1 ulp apart; 1 of"):
        train(brpo(), tmp_path / "run")


def by_definition(batch, p: int) -> list[list[float]]:
    """The advantage of each token of the rollouts of a prompt, from the log's order and the paper's sums."""
    rollouts, rewards = batch.rollouts[p * S : (p + 1) * S], batch.rewards[p]
    r = rewards[G:].reshape(G, M, ANSWERS)
    share = np.array(WEIGHTS) / sum(WEIGHTS)
    A = []
    for g in range(G):
        part_advantages = []
        for j in range(M):
            returns = [float(share[j:] @ r[i, j:].mean(1)) for i in range(G)]
            before = [2.0**i for i in range(j)]
            earned = np.average(r[g, :j].mean(1), weights=before) * share[j:].sum() if j else 0.0
            part_advantages.append(returns[g] - (j * earned + (M - j) * fmean(returns)) / M)
        length = len(rollouts[g].logprobs)
        A.append([part_advantages[sum(c >= b for b in BUDGETS)] for c in range(length)])
    for i, rollout in enumerate(rollouts[G:]):
        same = [k for k, x in enumerate(rollouts[G:]) if x.prompt_ids == rollout.prompt_ids]
        A.append([rewards[G + i] - fmean(rewards[G + k] for k in same)] * len(rollout.logprobs))
    return A


def test_the_gradient_is_that_of_transformers_in_fp64(brpo):
    """Cuts, advantages and the loss of all drawn tokens are computed again, in fp64."""
    cfg = brpo(num_generations=G)
    with first_state(cfg) as state:
        batch, _, gradient = first_gradient(state, cfg)
    A = [a for p in range(cfg.prompts) for a in by_definition(batch, p)]

    def loss(policy: Qwen3ForCausalLM) -> torch.Tensor:
        total = torch.zeros((), dtype=policy.dtype)
        for rollout, advantages in zip(batch.rollouts, A, strict=True):
            ids = torch.tensor([rollout.ids])
            logp = torch.log_softmax(policy(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
            drawn = logp[len(rollout.prompt_ids) - 1 :]
            total = total - (torch.tensor(advantages, dtype=policy.dtype) * drawn).sum()
        return total / (len(batch.rollouts) * cfg.sampling.max_tokens)

    views = state.policy.layout.checkpoint_views(gradient)
    assert_gradient_of_transformers(views, cfg.model, loss)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"task__answer_prefix": ""},
            r'loss\.advantage \("brpo"\) with task\.answer_prefix \(""\): .* set both',
        ),
        (
            {"loss__budgets": []},
            r"loss\.budgets \(\[\]\) must ascend and end with sampling\.max_tokens \(6\)",
        ),
        ({"loss__budgets": [3, 3, 6]}, r"loss\.budgets \(\[3, 3, 6\]\) must ascend"),
        ({"loss__budgets": [1, 3, 7]}, r"loss\.budgets \(\[1, 3, 7\]\) must ascend and end with"),
        ({"loss__budget_weights": [1.0]}, r"budget_weights \(\[1\.0\]\) must be a number for each of the 3"),
        ({"loss__budget_weights": [0.0] * 3}, r"budget_weights .* one of them above 0"),
        ({"loss__answers": 1}, r"loss\.answers \(1\) must be at least 2"),
        ({"num_generations": 1}, r"num_generations \(1\) must be at least 2"),
        ({"loss__max_resamples": 2}, r"max_resamples: brpo has rewards at several budgets"),
        ({"loss__overlong_share": 0.5}, r"overlong_share, .*: brpo has rewards at several budgets"),
        (
            {"loss__kl_coef": 0.1, "loss__kl_in": "reward"},
            r'kl_in = "reward", .*: brpo has rewards at several',
        ),
        ({"loss__preset": "grpo"}, r'loss\.advantage \("std"\) with task\.answer_prefix \(">="\)'),
        (
            {"loss__preset": "grpo", "task__answer_prefix": ""},
            r"loss\.budgets \(.*\) is of reasonings that are cut at budgets, and this loss has none",
        ),
        ({"task__name": "nim", "task__options": {}}, r"task\.answer_prefix: task nim has no answer"),
        ({"task__answer_prefix": "\u2603"}, r"has a character that the tokenizer does not know"),
        (
            {"sampling__max_tokens": 5000, "loss__budgets": [1, 3, 5000]},
            r"problem 0 has \d tokens; with a reasoning \(sampling\.max_tokens, 5000\) and 6 tokens of",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(brpo, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train(brpo(**changes), tmp_path / "run")
