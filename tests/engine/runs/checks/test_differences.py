"""diff finds a fault, planted at a random place of a run, at its step and quantity; replay repeats a run."""

import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from zerokl.cli import main
from zerokl.engine.config.run_config import Config
from zerokl.engine.runs.checks import replayer as replayer_module
from zerokl.engine.runs.checks.replayed_steps import drawn_steps
from zerokl.engine.runs.checks.replayer import Replayer
from zerokl.engine.runs.checks.step_trace import read_trace
from zerokl.engine.runs.run import train
from zerokl.engine.tasks.rewards import Reward
from zerokl.engine.train import collect
from zerokl.engine.train.optimizer import Optimizer
from zerokl.engine.train.parallel.workers import ParallelSampler, Workers
from zerokl.engine.train.step import train_step
from zerokl.model.blocks import mlp
from zerokl.verify.compare_runs import compare_runs, open_run
from zerokl.verify.ledger import Ledger, Line

STEPS = 5
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))]


@pytest.fixture(scope="module")
def plain(config):
    return config(steps=STEPS, checkpoint__every=2)


@pytest.fixture(scope="module")
def good(plain, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("good") / "run"
    train(plain, path)
    return path


def _first(a: Path, b: Path, config: Config):
    """The first difference of a run and of one with this configuration, which is trained now."""
    train(config, b)
    comparison = compare_runs(open_run(a), open_run(b))
    assert not comparison.equal
    return comparison.difference


def _flip(flat: torch.Tensor, draw: random.Random, layout) -> str:
    """Flip one bit of one weight in flat [numel] fp32; returns its name.

    The sign and the highest bits of the exponent are left alone, so that no infinity arises.
    """
    name, view = draw.choice(list(layout.checkpoint_views(flat).items()))
    bits = view.reshape(-1).view(torch.int32)
    bits[draw.randrange(len(bits))] ^= 1 << draw.randrange(29)
    return name


def test_equal_runs_have_one_ledger(plain, good, tmp_path, capsys):
    train(plain, tmp_path / "again")
    assert (tmp_path / "again" / "ledger.jsonl").read_bytes() == (good / "ledger.jsonl").read_bytes()
    assert main(["diff", str(good), str(tmp_path / "again")]) == 0
    assert "equal to the bit: 5 steps" in capsys.readouterr().out


@pytest.mark.parametrize("seed", SEEDS)
def test_a_flipped_bit_of_a_weight_is_found(plain, good, tmp_path, monkeypatch, capsys, seed):
    draw = random.Random(seed)
    step, flipped = draw.randrange(STEPS), []
    update = Optimizer.update

    def planted(self, *args):
        metrics = update(self, *args)
        if self.updates == step + 1:
            with torch.no_grad():
                flipped.append(_flip(self.weights.master, draw, self.layout))
        return metrics

    monkeypatch.setattr(Optimizer, "update", planted)
    d = _first(good, tmp_path / "run", plain)
    assert (d.step, d.quantity, d.part, d.others) == (step, "weights", flipped[0], 0)
    assert main(["diff", str(good), str(tmp_path / "run")]) == 1
    output = capsys.readouterr().out
    assert f"first difference step {step}: weights of {flipped[0]}\n" in output
    assert "no difference in the environment explains it" in output


@pytest.mark.parametrize("seed", SEEDS)
def test_a_perturbed_gradient_is_found(plain, good, tmp_path, monkeypatch, seed):
    """One element of one weight's gradient moves by one ulp, as after a race of two threads."""
    draw = random.Random(seed)
    step, calls, changed = draw.randrange(STEPS), [], []
    sum_shards = Workers.sum_shards

    def planted(self, work, shards):
        results, gradient = sum_shards(self, work, shards)
        calls.append(0)
        if len(calls) == step + 1:
            views = self.host.decoder.layout.checkpoint_views(gradient)
            name, view = draw.choice([(n, v) for n, v in views.items() if v.any()])
            flat = view.reshape(-1)
            flat[int(draw.choice(flat.nonzero()))].mul_(1 + 2**-23)
            changed.append(name)
        return results, gradient

    monkeypatch.setattr(Workers, "sum_shards", planted)
    d = _first(good, tmp_path / "run", plain)
    assert (d.step, d.quantity, d.part, d.others) == (step, "gradient", changed[0], 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_swapped_order_of_the_data_is_found(plain, good, tmp_path, monkeypatch, seed):
    swapped_step = random.Random(seed).randrange(STEPS)
    ordered = collect.step_problems

    def swapped(n, prompts, seed, step, *stream):
        indices = ordered(n, prompts, seed, step, *stream)
        return [indices[1], indices[0], *indices[2:]] if step == swapped_step else indices

    monkeypatch.setattr(collect, "step_problems", swapped)
    d = _first(good, tmp_path / "run", plain)
    assert (d.step, d.quantity) == (swapped_step, "prompts")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_changed_reward_is_found(plain, good, tmp_path, monkeypatch, capsys, seed):
    draw = random.Random(seed)
    step, p, g, calls = draw.randrange(STEPS), draw.randrange(3), draw.randrange(3), []
    values = Reward.values

    def changed(*args):
        r = values(*args)
        calls.append(0)
        if len(calls) == step + 1:
            r[p, g] += 0.125
        return r

    monkeypatch.setattr(Reward, "values", changed)
    d = _first(good, tmp_path / "run", plain)
    assert (d.step, d.quantity) == (step, "rewards")
    main(["diff", str(good), str(tmp_path / "run")])
    assert f"prompt {p}, sample {g}: reward" in capsys.readouterr().out


@pytest.mark.parametrize("seed", SEEDS)
def test_a_changed_sampler_logprob_is_found_beside_a_trainer_that_is_right(
    config, tmp_path, monkeypatch, seed
):
    draw = random.Random(seed)
    step, index = draw.randrange(3), draw.randrange(9)
    not_exact = config(exact=False)
    train(not_exact, tmp_path / "good")
    generate = ParallelSampler.generate

    def planted(self, requests):
        completions = generate(self, requests)
        if requests[0].rng_key.step == step:
            completions[index].logprobs[0] += 0.25
        return completions

    monkeypatch.setattr(ParallelSampler, "generate", planted)
    d = _first(tmp_path / "good", tmp_path / "run", not_exact)
    assert (d.step, d.quantity) == (step, "sampling_logprobs")


def test_another_seed_setting_or_model_is_found_before_the_first_step(config, good, model, tmp_path, capsys):
    base = tmp_path / "base"
    shutil.copytree(model, base)
    weights = bytearray((base / "model.safetensors").read_bytes())
    weights[-3] ^= 1  # a bit of the last tensor in the file
    (base / "model.safetensors").write_bytes(weights)
    for overrides, quantity, part in (
        ({"seed": 1}, "configuration", "seed"),
        ({"optimizer__lr": 2e-2}, "configuration", "optimizer.lr"),
        ({"model": base}, "first_weights", None),
    ):
        path = tmp_path / "-".join(overrides)
        d = _first(good, path, config(steps=1, **overrides))
        assert (d.step, d.quantity) == (None, quantity)
        assert d.part == part if part else d.part.startswith("model."), d.part
    assert main(["diff", str(good), str(tmp_path / "seed")]) == 1
    message = (
        "first difference before the first step: configuration seed: 0 and 1\nthen step 0: random keys\n"
    )
    assert message in capsys.readouterr().out


def test_what_explains_a_difference_is_named(good, tmp_path, capsys):
    """The two runs differ in one reward, in the version of torch and in the number of workers."""
    ledger = open_run(good)
    ledger.head.environment |= {"torch": "2.0", "process.workers": 7}
    line = ledger.lines[0]
    changed = Ledger(tmp_path / "ledger.jsonl", ledger.head)
    changed.append(Line(0, line.keys, line.quantities | {"rewards": "0" * 64}))
    assert main(["diff", str(good), str(tmp_path / "ledger.jsonl")]) == 1
    output = capsys.readouterr().out
    assert "first difference step 0: rewards" in output
    assert "may explain it:\n  torch: " in output
    assert "decide no bit, unless zerokl or the machine is at fault:\n  process.workers: 1 and 7" in output


def test_a_setting_of_one_head_is_not_told_again_as_one_that_decides_no_bit(good, tmp_path, capsys):
    """A key that is chained only where it is set: the other run has it in its environment."""
    ledger = open_run(good)
    key = next(key for key in ledger.head.environment if key.startswith("process.optimizer"))
    del ledger.head.environment[key]
    ledger.head.settings[key.removeprefix("process.")] = 7
    Ledger(tmp_path / "ledger.jsonl", ledger.head)
    assert main(["diff", str(good), str(tmp_path / "ledger.jsonl")]) == 1
    output = capsys.readouterr().out
    assert "first difference before the first step: configuration" in output
    assert key not in output


def test_a_longer_run_is_not_equal(config, good, tmp_path, capsys):
    train(config(steps=2), tmp_path / "short")
    assert main(["diff", str(good), str(tmp_path / "short")]) == 1
    assert "equal to the bit as far as both go" in capsys.readouterr().out


BAD_PAIRS = [
    ["{good}", "{tmp}"],
    ["{tmp}/no", "{good}"],
    ["{good}", "{tmp}/x.safetensors"],
    ["{tmp}/x.safetensors"] * 2,
]


@pytest.mark.parametrize("words", BAD_PAIRS)
def test_bad_input_of_diff_is_one_line_and_exit_code_2(good, tmp_path, capsys, words):
    (tmp_path / "x.safetensors").write_bytes(b"no trace")
    assert main(["diff", *(w.format(good=good, tmp=tmp_path) for w in words)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.full
def test_replay_repeats_every_step_from_the_nearest_checkpoint(good, capsys):
    settings = ["--workers", "2", "--micro_batch", "2"]
    assert main(["replay", str(good), "--step", "0", "--until", "4", *settings]) == 0
    assert "steps 0 to 4 done again: every bit is the ledger's" in capsys.readouterr().out
    assert main(["replay", str(good), "--step", "3"]) == 0
    assert "steps 2 to 3 done again: every bit is the ledger's" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "5"], "must lie in 0 to 4"),
        (["--step", "2", "--until", "1"], "must lie in 0 to 4"),
        (["--step", "1", "--optimizer.lr", "1"], "optimizer.lr (1.0, was 0.01) decides bits"),
        (["--step", "1", "--trace", "x.txt"], "must end with .safetensors"),
        (
            ["--step", "1", "--trace", "x.safetensors", "--update", "1"],
            "trace: update (1) must lie in 0 to 0",
        ),
        (["--step", "1", "--update", "1"], "--update (1) chooses what is traced"),
    ],
    ids=str,
)
def test_bad_input_of_replay_is_one_line(good, capsys, words, message):
    assert main(["replay", str(good), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fault_in_one_operation_is_named_by_the_traces(good, tmp_path, monkeypatch, capsys, seed):
    """One element of one operation's output of the trainer is moved by one ulp.

    The monitor would stop the step, so exact is off.
    """
    draw = random.Random(seed)
    # A step with a checkpoint, so that nothing is computed before the step.
    step, call = draw.choice([0, 2, 4]), draw.randrange(3)
    words = ["replay", str(good), "--step", str(step), "--exact", "false", "--trace"]
    assert main([*words, str(tmp_path / "a.safetensors")]) == 0
    assert main([*words, str(tmp_path / "b.safetensors")]) == 0
    assert main(["diff", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")]) == 0
    assert "equal to the bit" in capsys.readouterr().out.splitlines()[-1]
    plain, calls = mlp.silu_mul, []

    def planted(x):
        y = plain(x)
        if torch.is_grad_enabled() and len(x) % 32 == 0:  # the trainer's forward
            calls.append(0)
            if len(calls) == call + 1:
                flat = y.detach().view(-1).view(torch.int32)
                flat[int(draw.choice(y.detach()[:5].view(-1).nonzero()))] += 1
        return y

    monkeypatch.setattr(mlp, "silu_mul", planted)
    assert main([*words, str(tmp_path / "c.safetensors")]) in (0, 1)
    capsys.readouterr()
    assert main(["diff", str(tmp_path / "a.safetensors"), str(tmp_path / "c.safetensors")]) == 1
    # The first call is layer 0 of prompts, whose last layer calls no silu_mul. Then come layers 0 and 1 of
    # their samples.
    layer = (0, 0, 1)[call]
    place = f"layers.{layer}.silu_mul, prompt 0, sample 0, position "
    assert f"first difference: {place}" in capsys.readouterr().out


def _trace(run: Path, file: Path, *words: str) -> Path:
    """The trace of the last step of `run`, in `file`."""
    assert main(["replay", str(run), "--step", "1", "--trace", str(file), *words]) in (0, 1)
    return file


@pytest.fixture(scope="module")
def in_flight(config, tmp_path_factory) -> Path:
    """A run of 2 steps with 2 updates each. 4 shards cut 3 x 3 samples, so some begin within a prompt."""
    path = tmp_path_factory.mktemp("in_flight") / "run"
    settings = dict(steps=2, updates_per_rollout=2, shards_in_flight=2, loss__preset="dapo", exact=False)
    train(config(**settings, loss__max_resamples=2), path)
    return path


@pytest.mark.full
def test_traces_are_equal_whatever_is_computed_together(in_flight, tmp_path, capsys):
    """Settings that decide no bit decide no row of a trace either, and each update has its own trace."""
    a = _trace(in_flight, tmp_path / "a.safetensors")
    for name, words in {
        "one": ["--shards_in_flight", "1", "--micro_batch", "1"],
        "two": ["--shards_in_flight", "2", "--micro_batch", "2", "--recompute", "layer"],
        "four": ["--shards_in_flight", "4", "--micro_batch", "5"],
    }.items():
        b = _trace(in_flight, tmp_path / f"{name}.safetensors", *words)
        capsys.readouterr()
        assert main(["diff", str(a), str(b)]) == 0, name
        assert re.fullmatch(r"equal to the bit: \d+ operations\n", capsys.readouterr().out)
    traced = read_trace(a)
    rows = [tuple(place) for place in traced.places[0].tolist()]
    assert rows == sorted(set(rows)), "every row once, in canonical order"
    second = _trace(in_flight, tmp_path / "second.safetensors", "--update", "1")
    capsys.readouterr()
    assert main(["diff", str(a), str(second)]) == 1
    first_line, difference = capsys.readouterr().out.splitlines()
    assert first_line == "the traces are of step 1, update 0 and of step 1, update 1"
    assert difference.startswith("first difference: embed, prompt 0, sample 0, position 0"), "newer weights"


def test_the_rows_of_a_trace_are_those_of_the_rollouts(in_flight, tmp_path):
    """Ids and logprobs at each place are what the step's rollouts hold there."""
    traced, rollouts = [], {}
    with Replayer(in_flight, {"shards_in_flight": 4, "workers": 1}) as replayer:
        file = tmp_path / "a.safetensors"
        replayer.replay(1, trace=file, after=traced.append)
    for rollout in traced[-1].episodes.rollouts:
        rollouts[rollout.prompt, rollout.sample] = rollout
    trace = read_trace(file)
    for (prompt, sample, position), token in zip(
        trace.places[0].tolist(), trace.operations["token_ids"][:, 0].tolist(), strict=True
    ):
        r = rollouts[prompt, sample]
        assert token == (*r.prompt_ids, *r.completion_ids)[position]
    logp = trace.operations["logprob"][:, 0].numpy()
    for (prompt, sample, position), value in zip(trace.places[2].tolist(), logp, strict=True):
        r = rollouts[prompt, sample]
        assert value == r.logprobs[position - len(r.prompt_ids)]
    assert len(logp) == sum(len(r.completion_ids) for r in rollouts.values())


@pytest.mark.parametrize("in_flight_shards", [*(pytest.param(n, marks=pytest.mark.full) for n in (1, 2)), 4])
def test_a_fault_is_named_at_its_place_with_shards_in_flight(
    in_flight, tmp_path, monkeypatch, capsys, in_flight_shards
):
    """One element of the last row of a chosen sample moves by one ulp."""
    words = ["--shards_in_flight", str(in_flight_shards)]
    a = _trace(in_flight, tmp_path / "a.safetensors", *words)
    trace = read_trace(a)
    index = int((trace.places[0][:, 1] == 2).nonzero()[-1])
    prompt, sample, position = trace.places[0][index].tolist()
    row, plain = trace.operations["layers.0.silu_mul"][index], mlp.silu_mul

    def planted(x):
        y = plain(x)
        for i in (y.detach() == row).all(1).nonzero()[:, 0].tolist():
            y.detach()[i, 3:4].view(torch.int32).add_(1)
        return y

    monkeypatch.setattr(mlp, "silu_mul", planted)
    b = _trace(in_flight, tmp_path / "b.safetensors", *words)
    capsys.readouterr()
    assert main(["diff", str(a), str(b)]) == 1
    place = f"layers.0.silu_mul, prompt {prompt}, sample {sample}, position {position}; 1 of "
    assert f"first difference: {place}" in capsys.readouterr().out


def test_verify_run_holds_and_names_what_does_not(good, tmp_path, monkeypatch, capsys):
    assert main(["verify", "run", str(good), "--replays", "2"]) == 0
    output = capsys.readouterr().out
    *findings, last = output.splitlines()
    assert output.count("ok  ") == len(findings) - 2 >= 8
    assert output.count("note  replays: ") == output.count("note  evaluations: none") == 1
    assert re.fullmatch(r"steps to replay were drawn with --draw \d+", last)
    path = tmp_path / "run"
    shutil.copytree(good, path)
    verify = ["verify", "run", str(path), "--replays", "0"]
    weights = path / "checkpoints" / "step-000004" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 4
    weights.write_bytes(content)
    assert main(verify) == 1
    assert f"FAIL step-000004: {weights} was altered" in " ".join(capsys.readouterr().out.split())
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        plain = (path / name).read_bytes()
        (path / name).write_bytes(plain.replace(b"0.", b"1.", 1))
        assert main(verify) == 1
        assert f"FAIL {name}: was altered before step" in " ".join(capsys.readouterr().out.split())
        (path / name).write_bytes(plain)
    lines = (path / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (path / "ledger.jsonl").write_bytes(b"".join(lines[:-1]))
    assert main(verify) == 1
    assert "not the ledger's last chain value" in capsys.readouterr().out


@pytest.mark.full
def test_verify_run_reaches_its_steps_in_one_pass(plain, tmp_path, monkeypatch, capsys):
    """A checkpoint after 3 steps stands between some of them. No step is done twice for the sake of two."""
    checkpoint = plain.checkpoint.model_copy(update={"every": 3})
    train(plain.model_copy(update={"checkpoint": checkpoint}), tmp_path / "run")
    done = []

    def counted(state, recorder):
        done.append(state.step)
        return train_step(state, recorder)

    monkeypatch.setattr(replayer_module, "train_step", counted)
    with Replayer(tmp_path / "run") as replayer:
        for steps, passes in (
            ([0, 1, 2], [(0, 2)]),
            ([0, 1, 3, 4], [(0, 1), (3, 4)]),
            ([1, 2, 4], [(0, 4)]),
            ([2, 0], [(0, 2), (0, 0)]),
        ):
            done.clear()
            assert all(replayer.replay(step).difference is None for step in steps)
            again = [step for first, last in passes for step in range(first, last + 1)]
            assert done == again
            if steps == sorted(steps):
                assert replayer.passes(steps) == passes
            replayer.replay(STEPS - 1)  # nothing can go on from the end
    assert main(["verify", "run", str(tmp_path / "run"), "--draw", "1"]) == 0
    note = re.search(
        r"note  replays: (.*), drawn at random, and the last; .* steps (.*) are\s+done again",
        capsys.readouterr().out,
    )
    assert [int(step) for step in note[1].split(", ")] == drawn_steps(STEPS, 3, 1)
    assert re.fullmatch(r"\d to \d( and \d to \d)?", note[2])


def test_control_after_a_difference_nothing_goes_on_from_the_wrong_state(good, monkeypatch):
    with Replayer(good) as replayer:
        values = Reward.values
        monkeypatch.setattr(Reward, "values", lambda *args: values(*args) * 2)
        assert replayer.replay(0).difference
        monkeypatch.setattr(Reward, "values", values)
        assert replayer.replay(1).difference is None


def test_control_verify_run_sees_a_machine_that_computes_otherwise(good, monkeypatch, capsys):
    values = Reward.values
    monkeypatch.setattr(Reward, "values", lambda *args: values(*args) * 2)
    assert main(["verify", "run", str(good), "--replays", "1"]) == 1
    assert "rewards" in capsys.readouterr().out


@pytest.mark.parametrize("detail", ["roots", "gradients"])
def test_less_detail_names_no_weight_but_chains_the_same(plain, good, tmp_path, detail):
    chosen = plain.model_copy(update={"ledger": plain.ledger.model_copy(update={"detail": detail})})
    train(chosen, tmp_path / "run")
    assert compare_runs(open_run(good), open_run(tmp_path / "run")).equal
    line = json.loads((tmp_path / "run" / "ledger.jsonl").read_text().splitlines()[1])
    assert set(line["leaves"]) == ({"gradient"} if detail == "gradients" else set())
