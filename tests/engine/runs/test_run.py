"""What a run leaves behind, and what its numbers mean."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from zerokl.engine.config.config_file import load_config
from zerokl.engine.config.loss_section import PRESETS
from zerokl.engine.rollout.policy import load_policy
from zerokl.engine.runs.ending import figures
from zerokl.engine.runs.loaded import load_run
from zerokl.engine.runs.run import train
from zerokl.engine.runs.setup import settled
from zerokl.engine.runs.summary import summarise
from zerokl.engine.tasks.loading import load_task
from zerokl.model.checkpoint import load_decoder
from zerokl.model.checkpoint_writing import write_checkpoint
from zerokl.model.config import ModelConfig
from zerokl.model.weights import Layout, fingerprint

from tests.presets import REWARD_PRESETS

KEYS = {
    "mismatch/k1",
    "mismatch/k2",
    "mismatch/k3",
    "mismatch/max_abs",
    "mismatch/frac_equal",
    "mismatch/ratio_p1",
    "mismatch/ratio_p50",
    "mismatch/ratio_p99",
    "mismatch/ratio_min",
    "mismatch/ratio_max",
    "mismatch/ess",
    "mismatch/chi2",
    "mismatch/sequence_ratio_min",
    "mismatch/sequence_ratio_max",
    "step",
    "reward/mean",
    "reward/std",
    "loss",
    "grad_norm",
    "entropy",
    "response_len/mean",
    "tokens",
    "time/sample_s",
    "time/train_s",
    "time/ledger_s",
    "time/prompts_s",
    "time/decode_s",
    "time/reward_s",
    "time/score_s",
    "time/forward_backward_s",
    "time/optimizer_s",
    "time/sync_s",
    "perf/tokens_per_s",
    "perf/samples_at_once",
    "perf/peak_memory_bytes",
}


@pytest.fixture(scope="module")
def four_steps(config):
    return config(steps=4, evaluation__every=2, checkpoint__every=2, optimizer__schedule="linear")


@pytest.fixture(scope="module")
def run(four_steps, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("runs") / "run"
    return path, train(four_steps, path)


def test_a_run_folder_holds_everything(run):
    path, _ = run
    logs = {"ledger.jsonl", "metrics.jsonl", "rollouts.jsonl", "tensorboard"}
    others = {"config.toml", "checkpoints", "summary.json"}
    assert {p.name for p in path.iterdir()} == logs | others
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == ["step-000002", "step-000004"]


def test_metrics_have_one_object_a_step_with_every_key(run, read_jsonl):
    lines = read_jsonl(run[0] / "metrics.jsonl")
    assert [m["step"] for m in lines] == [0, 1, 2, 3]
    for m in lines:
        assert m.keys() >= KEYS
        assert all(math.isfinite(v) for v in m.values())
        for name in ("max_abs", "k1", "k2", "k3", "chi2"):
            assert m[f"mismatch/{name}"] == 0.0, name
        for name in ("frac_equal", "ess", "ratio_min", "sequence_ratio_max"):
            assert m[f"mismatch/{name}"] == 1.0, name
        assert 0 < m["entropy"] <= math.log(64)
        assert m["time/sample_s"] > 0 < m["time/train_s"]
    assert [m["step"] for m in lines if "eval/reward" in m] == [1, 3]
    assert [m["step"] for m in lines if "eval/base_reward" in m] == [0]
    assert len({m["loss"] for m in lines}) > 1 < len({m["grad_norm"] for m in lines})


def test_the_held_out_curve_begins_at_the_base_model(run, four_steps):
    """Each point is what the weights give by themselves: the base model's, and those of the checkpoints."""
    path, cfg = run[0], four_steps
    folders = {0: cfg.model, 2: path / "checkpoints/step-000002", 4: path / "checkpoints/step-000004"}

    def accuracy(folder):
        return load_policy(str(folder)).evaluate(cfg.task, max_tokens=cfg.sampling.max_tokens).mean_reward

    curve = load_run(path).held_out
    assert curve == [(done, accuracy(folder)) for done, folder in folders.items()]
    assert len({x for _, x in curve}) > 1


def test_metrics_sum_up_the_rollouts(run, read_jsonl):
    all_rollouts = read_jsonl(run[0] / "rollouts.jsonl")
    for m in read_jsonl(run[0] / "metrics.jsonl"):
        rollouts = [r for r in all_rollouts if r["step"] == m["step"]]
        assert [(r["prompt"], r["sample"]) for r in rollouts] == [(p, g) for p in range(3) for g in range(3)]
        n, rewards = len(rollouts), [r["reward"] for r in rollouts]
        assert rewards == [sum(c.isalpha() for c in r["text"]) / 8 for r in rollouts]
        mean = sum(rewards) / n
        assert m["reward/mean"] == pytest.approx(mean)
        assert m["reward/std"] == pytest.approx(math.sqrt(sum((r - mean) ** 2 for r in rewards) / n))
        lengths = [len(r["completion_ids"]) for r in rollouts]
        assert (m["tokens"], m["response_len/mean"]) == (sum(lengths), sum(lengths) / n)
        assert [len(r["logprobs"]) for r in rollouts] == lengths
        assert m["completions/cut"] == sum(r["finish"] == "length" for r in rollouts)
        assert m["completions/empty"] == sum(r["text"] == "" for r in rollouts)
        assert {r["weight_version"] for r in rollouts} == {m["step"]}


@pytest.mark.parametrize("preset", REWARD_PRESETS)
def test_the_logged_loss_is_that_of_the_logged_rollouts(config, read_jsonl, tmp_path, preset):
    train(config(steps=1, loss__preset=preset), tmp_path / "run")
    rollouts = read_jsonl(tmp_path / "run" / "rollouts.jsonl")
    (m,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    lengths = [len(r["completion_ids"]) for r in rollouts]
    weights = {
        "length": [1 / (9 * n) for n in lengths],
        "tokens": [1 / sum(lengths)] * 9,
        "constant": [1 / (9 * 8)] * 9,
    }[PRESETS[preset]["loss_agg_mode"]]
    # On-policy each token's term is its advantage. It is multiplied by logp where logp carries the gradient.
    sums = [sum(r["logprobs"]) for r in rollouts] if preset in ("cispo", "kimi") else lengths
    terms = [-w * x * r["advantage"] for w, x, r in zip(weights, sums, rollouts, strict=True)]
    # Four fp32 roundings of each token's term: advantage, weight, products.
    assert m["loss"] == pytest.approx(sum(terms), abs=4 * 2**-24 * sum(map(abs, terms)))
    groups = [rollouts] if preset == "reinforce++" else [rollouts[3 * p : 3 * p + 3] for p in range(3)]
    for group in groups:
        assert sum(r["advantage"] for r in group) == pytest.approx(0, abs=1e-12)


def test_tensorboard_has_every_metric_of_every_step(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run[0] / "tensorboard"))
    board.Reload()
    assert KEYS - {"step"} <= set(board.Tags()["scalars"])
    assert [e.step for e in board.Scalars("mismatch/k1")] == [0, 1, 2, 3]


def test_summary_totals_the_metrics(run, read_jsonl):
    path, summary = run
    lines = read_jsonl(path / "metrics.jsonl")
    assert json.loads((path / "summary.json").read_text()) == vars(summary)
    assert (summary.steps, summary.tokens) == (4, sum(m["tokens"] for m in lines))
    assert (summary.tokens_unequal, summary.mismatch_max_abs) == (0, 0.0)
    assert (summary.reward_first, summary.reward_last) == (lines[0]["reward/mean"], lines[-1]["reward/mean"])
    assert (summary.held_out_reward, summary.held_out_accuracy) == (lines[-1]["eval/reward"], None)


def test_config_toml_is_the_same_configuration_and_gives_the_same_run(run, four_steps, tmp_path):
    path, summary = run
    again = load_config(str(path / "config.toml"), None, {})
    assert again == settled(four_steps)
    assert (again.device, again.task.directory) == ("cpu", os.getcwd())
    assert train(again, tmp_path / "again").fingerprint == summary.fingerprint
    assert (tmp_path / "again" / "config.toml").read_text() == (path / "config.toml").read_text()


def test_transformers_opens_the_checkpoint_with_its_weights(run):
    path, summary = run
    folder = path / "checkpoints" / "step-000004"
    weights = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    layout = Layout(ModelConfig.from_file(folder))
    flat = torch.zeros(layout.numel)
    for name, view in layout.checkpoint_views(flat).items():
        view.copy_(weights[name])
    assert fingerprint(layout, flat) == summary.weights
    assert AutoTokenizer.from_pretrained(folder).encode("1+2=") == [4, 39, 5, 43]


def test_checkpoints_on_the_way_are_the_weights_of_that_step(config, four_steps, run, tmp_path):
    never = four_steps.evaluation.model_copy(update={"every": 0})
    summary = train(four_steps.model_copy(update={"evaluation": never}), tmp_path / "run")
    assert summary.fingerprint == run[1].fingerprint, "evaluating must not change the training"
    for step in ("step-000002", "step-000004"):
        a, b = (path / "checkpoints" / step / "model.safetensors" for path in (run[0], tmp_path / "run"))
        assert a.read_bytes() == b.read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "generation_params",
    [
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"top_k": 9, "temperature": 1.3},
        {"min_p": 0.1, "logit_bias": {"17": 2.0}},
        {"top_p": 0.95, "min_p": 0.02, "allowed_token_ids": list(range(40))},
    ],
)
def test_mismatch_is_zero_under_any_distribution(config, tmp_path, dtype, generation_params):
    keys = {f"sampling__{k}": v for k, v in generation_params.items()}
    summary = train(config(dtype=dtype, **keys), tmp_path / "run")
    assert (summary.mismatch_max_abs, summary.tokens_unequal) == (0.0, 0)
    assert summary.tokens > 3 * 9


@pytest.mark.full
def test_training_raises_the_reward(config, tmp_path):
    summary = train(config(steps=25, prompts=8, num_generations=8, optimizer__lr="1e-3"), tmp_path / "run")
    assert summary.reward_last5 > summary.reward_first + 0.1


@pytest.mark.parametrize(("limit", "seen"), [(0, 9), (3, 3), (50, 9)])
def test_problems_limits_the_training_set_to_its_first(config, model, tmp_path, read_jsonl, limit, seen):
    options = {"max_value": 9, "train": 9, "held_out": 3}
    train(config(steps=4, task__options=options, task__problems=limit), tmp_path / "run")
    problems = load_task("add", options).problems("train")
    prompts = AutoTokenizer.from_pretrained(model)([p.prompt for p in problems[:seen]])["input_ids"]
    drawn = read_jsonl(tmp_path / "run" / "rollouts.jsonl")
    assert {tuple(r["prompt_ids"]) for r in drawn} == set(map(tuple, prompts))


def test_special_groups_and_completions_are_counted(config, read_jsonl, model, tmp_path):
    """Groups of equal rewards, empty completions and cut ones.

    A group in which no sample earns the reward is all equal. A completion of only the stop token is empty.
    """
    uniform = load_decoder(model, torch.float32)
    with torch.no_grad():
        # Every logit is 0, so one completion in 64 is empty.
        uniform.w["norm"].zero_()
    write_checkpoint(tmp_path / "uniform", uniform.layout, uniform.flat.detach(), companions=model)
    sizes = dict(steps=1, prompts=20, num_generations=32, sampling__max_tokens=2)
    train(config(model=tmp_path / "uniform", task__reward="", **sizes), tmp_path / "run")
    (m,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    rollouts = read_jsonl(tmp_path / "run" / "rollouts.jsonl")
    empty = [r for r in rollouts if r["completion_ids"] == [1]]
    assert 0 < len(empty) <= m["completions/empty"] == sum(r["text"] == "" for r in rollouts)
    assert m["completions/cut"] == sum(1 not in r["completion_ids"] for r in rollouts) > 0
    groups = [[r["reward"] for r in rollouts if r["prompt"] == p] for p in range(20)]
    assert m["groups/all_equal"] == sum(len(set(g)) == 1 for g in groups) > 0


def test_a_step_of_all_equal_groups_changes_no_weight(config, model, tmp_path):
    base = load_decoder(model, torch.float32)
    summary = train(config(steps=1, task__reward="toy:constant"), tmp_path / "run")
    assert summary.weights == fingerprint(base.layout, base.flat.detach())


def test_the_display_shows_every_mismatch_metric_where_a_bit_differs(config, tmp_path, capsys):
    train(config(steps=1, exact=False, perturb__logit_noise=0.1), tmp_path / "run")
    output = capsys.readouterr().out
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    names = {name for name in metrics if name.startswith("mismatch/")}
    names -= {"mismatch/max_abs", "mismatch/frac_equal"}
    assert len(names) >= 12
    assert all(f"{name.removeprefix('mismatch/')} {metrics[name]:.4g}" in output for name in names)
    train(config(steps=1), tmp_path / "exact")
    assert "k1" not in capsys.readouterr().out


def test_held_out_prompts_that_are_trained_on_are_counted_in_one_line(config, tmp_path, capsys):
    lines = [json.dumps({"prompt": f"{i}+1=", "answer": i + 1}) + "\n" for i in range(6)]
    (tmp_path / "train.jsonl").write_text("".join(lines))
    (tmp_path / "test.jsonl").write_text("".join(lines[4:]) + '{"prompt": "9+9=", "answer": 18}\n')
    options = {"file": str(tmp_path / "train.jsonl"), "held_out_file": str(tmp_path / "test.jsonl")}
    jsonl = config(task__name="jsonl", task__options=options, task__reward="", evaluation__every=1, steps=1)
    summary = train(jsonl, tmp_path / "run")
    output = " ".join(capsys.readouterr().out.split())
    assert "2 of 3 held-out prompts are training prompts as well, such as '4+1='" in output
    assert summary.held_out_accuracy == summary.held_out_reward is not None
    assert any(line.startswith("held-out accuracy ") for line in figures(summary, tmp_path / "run"))
    graded = replace(summary, held_out_accuracy=None)
    assert any(line.startswith("held-out mean reward ") for line in figures(graded, tmp_path / "run"))


@pytest.mark.parametrize(("steps", "count"), [(1, "last step"), (3, "last 3 steps"), (9, "last 5 steps")])
def test_the_mean_of_the_last_steps_says_of_how_many(steps, count):
    row = {"reward/mean": 0.5, "tokens": 1, "mismatch/frac_equal": 1.0, "mismatch/max_abs": 0.0}
    summary = summarise([row] * steps, "", "", 1.0)
    assert next(figures(summary, Path())) == f"reward 0.500 -> 0.500 ({count} 0.500)"
