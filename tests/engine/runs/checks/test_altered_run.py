"""`verify run` finds whatever is altered in a run's logs and summary; resume changes nothing it must not."""

import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from zerokl.cli import main
from zerokl.engine.runs import run as run_module
from zerokl.engine.runs.checks.checked_run import fault_in
from zerokl.engine.runs.checks.verify_run import verify_run
from zerokl.engine.runs.intact_checkpoints import open_checkpoint
from zerokl.engine.runs.resume import derived_summary
from zerokl.engine.runs.run import resume, train
from zerokl.engine.runs.summary import write_summary
from zerokl.files.writing import hash_json
from zerokl.verify.difference import Mark
from zerokl.verify.ledger import read_ledger

from tests.engine.runs.exact_runs import faults, forget_end
from tests.forged_run import (
    all_solved,
    chain_again,
    forge_file,
    forge_head,
    forge_manifest,
    forge_rollouts,
    forge_weight,
)
from tests.helpers import contents, property_settings

# Fields and metrics that only a replay can derive. Those that are measured cannot be derived at all.
REPLAYED = {"weight_version", "loss", "entropy", "grad_norm", "lr", "eval/reward", "advantage"}
REPLAYED |= {"eval/base_reward", "update/moved"}
MEASURED = ("time/", "perf/")
STEPS = 5
# Of the steps that are done again.
DRAWS = [0, *(pytest.param(draw, marks=pytest.mark.full) for draw in (1, 2, 3))]


@pytest.fixture(scope="module")
def run(config, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("altered") / "run"
    train(config(steps=STEPS, checkpoint__every=2, evaluation__every=2), path)
    return path


@pytest.fixture(scope="module")
def cut(run, tmp_path_factory) -> Path:
    """The run as a kill in its last step leaves it: step 4 is in the logs, and in no checkpoint."""
    path = tmp_path_factory.mktemp("cut") / "run"
    shutil.copytree(run, path)
    forget_end(path)
    return path


def contents_and_times(path: Path) -> dict[Path, tuple]:
    """Every file with bytes and time of change."""
    return {p: (p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else b"") for p in path.rglob("*")}


def other(value: Any, draw: random.Random) -> Any:
    """Another value of the same type, as close as can be."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return value + draw.choice([-1, 1])
    if isinstance(value, float):
        return math.nextafter(value, draw.choice([-math.inf, math.inf]))
    if isinstance(value, str):
        return value + "x" if draw.random() < 0.5 or not value else value[:-1]
    if not value or draw.random() < 0.3:
        return value + value[:1] if value else [1]
    index = draw.randrange(len(value))
    return [*value[:index], other(value[index], draw), *value[index + 1 :]]


def alter(file: Path, number: int, draw: random.Random, keep: Callable[[str], bool]) -> str:
    """Alter one field of a line of a JSONL file, or of a JSON file. Returns the field's name."""
    lines = file.read_text().split("\n") if file.suffix == ".jsonl" else [file.read_text()]
    values = json.loads(lines[number])
    name = draw.choice(sorted(name for name in values if keep(name)))
    if draw.random() < 0.2:
        del values[name]
    else:
        values[name] = other(values[name], draw)
    lines[number] = json.dumps(values)
    file.write_text("\n".join(lines))
    return name


def check_alteration(cut: Path, folder: Path, seed: int, replays: int) -> None:
    """One field of a run is altered, and `verify run` finds it."""
    draw, path = random.Random(seed), folder / "run"
    shutil.copytree(cut, path, ignore=shutil.ignore_patterns("tensorboard"))
    name, per_step = draw.choice([("rollouts.jsonl", 9), ("metrics.jsonl", 1)])
    number = 4 * per_step + draw.randrange(per_step)
    forbidden = () if replays else tuple(REPLAYED)
    field = alter(path / name, number, draw, lambda f: not f.startswith((*MEASURED, *forbidden)))
    assert faults(path, replays), f"{name} {number} {field}"
    shutil.rmtree(path)


def test_what_cannot_be_read_is_a_fault():
    assert fault_in((Path("nowhere") / "state.json").read_text).endswith("'nowhere/state.json'")
    assert fault_in(lambda: None) is None
    assert fault_in(lambda: (_ for _ in ()).throw(ValueError)) == "ValueError", "an empty reason is no pass"


def test_a_run_that_nobody_altered_holds(run, cut):
    assert faults(run, STEPS) == faults(cut, STEPS) == []


@pytest.mark.parametrize("value", [0.123, None])
def test_a_replay_of_the_first_step_evaluates_the_base_model_again(cut, tmp_path, value):
    path = tmp_path / "run"
    shutil.copytree(cut, path)
    first, *others = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    metrics = json.loads(first)
    del metrics["eval/base_reward"]
    metrics |= {} if value is None else {"eval/base_reward": value}
    (path / "metrics.jsonl").write_text("".join([json.dumps(metrics) + "\n", *others]))
    (line,) = [f for f in faults(path, STEPS) if f.startswith("replay of step")]
    assert line.startswith(
        f"replay of step 0: metrics.jsonl: eval/base_reward is {value or 'nothing'}, and the step gives 0."
    )


@pytest.mark.full
@given(st.integers(0, 10**9))
@property_settings(300)
def test_whatever_is_altered_after_the_last_checkpoint_is_found(cut, tmp_path_factory, seed):
    check_alteration(cut, tmp_path_factory.mktemp("a"), seed, replays=0)


@pytest.mark.full
@given(st.integers(0, 10**9))
@property_settings(20)
def test_a_replay_finds_what_only_a_replay_can_derive(cut, tmp_path_factory, seed):
    check_alteration(cut, tmp_path_factory.mktemp("r"), seed, replays=STEPS)


@pytest.mark.proof
@given(st.integers(0, 10**9))
@settings(parent=property_settings(10_000), max_examples=10_000)
def test_ten_thousand_alterations_are_found(cut, tmp_path_factory, seed):
    check_alteration(cut, tmp_path_factory.mktemp("p"), seed, replays=0)


@pytest.mark.full
def test_every_field_of_the_summary_is_derived_again(run, tmp_path, capsys):
    names = json.loads((run / "summary.json").read_text())
    for name, value in names.items():
        path = tmp_path / name
        shutil.copytree(run, path)
        changed = names | {name: -1.0 if name == "seconds" else other(value, random.Random(0))}
        (path / "summary.json").write_text(json.dumps(changed))
        (line,) = faults(path, 0)
        assert line.startswith("summary: ")
        assert name in line
        resume(path)
        assert faults(path, 0) == []
        assert json.loads((path / "summary.json.damaged").read_text()) == changed
        capsys.readouterr()


def test_a_finished_run_that_is_resumed_changes_nothing(run, tmp_path, capsys):
    path = tmp_path / "run"
    shutil.copytree(run, path)
    before = contents_and_times(path)
    assert vars(resume(path)) == json.loads((path / "summary.json").read_text())
    assert vars(resume(path, {"workers": 2})) == json.loads((path / "summary.json").read_text())
    (path / "rollouts.jsonl").unlink()
    resume(path)
    after = contents_and_times(path)
    assert after == {p: c for p, c in before.items() if p.name != "rollouts.jsonl"}
    assert "all 5 steps of " in capsys.readouterr().out


@pytest.mark.full
def test_without_rollouts_a_run_goes_on_and_verify_says_what_is_lost(run, cut, tmp_path, capsys):
    path = tmp_path / "run"
    shutil.copytree(cut, path)
    (path / "rollouts.jsonl").unlink()
    resume(path)
    output = capsys.readouterr().out
    assert "rollouts.jsonl is missing; from now on it begins at step 4" in output
    assert "going on at step 4 of 5" in output
    assert (path / "ledger.jsonl").read_bytes() == (run / "ledger.jsonl").read_bytes()
    whole = (run / "rollouts.jsonl").read_bytes().splitlines(keepends=True)
    assert (path / "rollouts.jsonl").read_bytes() == b"".join(whole[4 * 9 :])
    assert faults(path, 5) == ["rollouts.jsonl: begins at step 4: the steps before are lost"]
    forget_end(path)
    resume(path)
    assert (path / "rollouts.jsonl").read_bytes() == b"".join(whole[4 * 9 :])
    # An older checkpoint than the first step that the file holds: the file begins there, the old one is kept.
    shutil.rmtree(path / "checkpoints" / "step-000005")
    (path / "checkpoints" / "step-000004" / "config.json").unlink()
    resume(path)
    assert (path / "rollouts.jsonl").read_bytes() == b"".join(whole[2 * 9 :])
    assert (path / "rollouts.jsonl.damaged").read_bytes() == b"".join(whole[4 * 9 :])


FILES = ("ledger.jsonl", "metrics.jsonl", "rollouts.jsonl", "summary.json", "config.toml")
FOLDERS = ("checkpoints", "tensorboard")


@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
@pytest.mark.parametrize("how", ["other kind", "link to nothing", "link to itself", "pipe"])
def test_nothing_is_cut_when_a_file_of_the_run_is_no_file(cut, tmp_path, capsys, name, how):
    path = tmp_path / "run"
    shutil.copytree(cut, path)
    with (path / "metrics.jsonl").open("a") as torn:
        torn.write('{"step": 5')
    victim = path / name
    if victim.exists():
        shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
    if how == "pipe":
        os.mkfifo(victim)
    elif how == "other kind":
        victim.write_text("") if name in FOLDERS else victim.mkdir()
    else:
        victim.symlink_to(victim if how == "link to itself" else tmp_path / "nothing")

    before = contents(path)
    assert main(["train", "--resume", str(path)]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert str(victim) in error
    assert contents(path) == before


@pytest.mark.parametrize("content", ["", "[task]\n", "workers = 1\n"])
def test_an_emptied_configuration_is_refused_first(cut, tmp_path, capsys, content):
    path = tmp_path / "run"
    shutil.copytree(cut, path)
    (path / "config.toml").write_text(content)
    before = contents_and_times(path)
    for words in (["train", "--resume"], ["verify", "run"], ["replay", "--step", "0"]):
        assert main([*words, str(path)]) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        assert ("config.toml sets no key" if not content else "config.toml lacks ") in error
    assert contents_and_times(path) == before


def test_an_altered_setting_is_refused_before_the_model_is_read(cut, tmp_path, capsys):
    path = tmp_path / "run"
    shutil.copytree(cut, path)
    text = (path / "config.toml").read_text()
    (path / "config.toml").write_text(
        text.replace("seed = 0", "seed = 1").replace('model = "/', 'model = "/no/')
    )
    assert main(["train", "--resume", str(path)]) == 2
    assert "seed is 1 in" in capsys.readouterr().err


FORGED = {
    "updates": ("trainer/state.json", lambda x: x.update(updates=x["updates"] + 500)),
    "version": ("trainer/state.json", lambda x: x.update(version=x["version"] + 1)),
    "scale": ("trainer/state.json", lambda x: x["scaler"].update(scale=2.0)),
    "clean": ("trainer/state.json", lambda x: x["scaler"].update(clean=x["scaler"]["clean"] + 1)),
    "in_a_row": ("trainer/state.json", lambda x: x["scaler"].update(in_a_row=1)),
    "rms_norm_eps": ("config.json", lambda x: x.update(rms_norm_eps=1e-3)),
    "task.json": ("task.json", lambda x: x["options"].update(max_value=8)),
    "tokenizer.json": ("tokenizer.json", lambda x: x["model"]["vocab"].update({"+": 1, "1": 2})),
}


@pytest.mark.full
@pytest.mark.parametrize("what", FORGED)
def test_a_checkpoint_whose_small_files_are_forged_is_found(run, cut, tmp_path, what):
    path = tmp_path / "run"
    shutil.copytree(cut, path)
    forge_file(path / "checkpoints" / "step-000004", *FORGED[what])
    lines = faults(path, 0)
    assert any("step-000004" in line and what.removeprefix("rms_norm_") in line for line in lines), lines
    resume(path)  # from the checkpoint before it, or with a tokenizer that the ledger's tokens contradict
    if what != "tokenizer.json":
        assert (path / "ledger.jsonl").read_bytes() == (run / "ledger.jsonl").read_bytes()
        assert faults(path, 0) == []


@pytest.fixture(scope="module")
def skipping(config, tmp_path_factory) -> Path:
    """A run whose loss scale grows until an update overflows and is skipped."""
    path = tmp_path_factory.mktemp("skipping") / "run"
    scale = {"scaling": "dynamic", "scale": 2.0**22, "growth_interval": 1}
    settings = {f"precision__{name}": value for name, value in scale.items()}
    train(config(steps=STEPS, checkpoint__every=2, dtype="float16", **settings), path)
    return path


@pytest.mark.full
def test_counters_of_a_run_with_skipped_updates_are_bound(skipping, tmp_path):
    assert faults(skipping, STEPS) == []
    updates = [line.updates for line in read_ledger(skipping / "ledger.jsonl").lines]
    assert 0 < updates[-1] < STEPS, "some updates were skipped"
    for name in ("updates", "version", "scale", "clean", "in_a_row"):
        path = tmp_path / name
        shutil.copytree(skipping, path)
        forge_file(path / "checkpoints" / "step-000004", *FORGED[name])
        (line,) = faults(path, 0)
        assert re.search(rf"step-000004: .*{name} is .*, and .* in the ledger; the file was altered$", line)


def test_a_scale_that_is_forged_in_checkpoint_and_ledger_is_found_by_the_replay(skipping, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(skipping, path)
    forge_file(path / "checkpoints" / "step-000004", *FORGED["scale"])
    lines = [json.loads(line) for line in (path / "ledger.jsonl").read_text().splitlines()]
    lines[4]["notes"]["scaler"]["scale"] = 2.0
    lines[4]["sum"] = hash_json({name: value for name, value in lines[4].items() if name != "sum"})
    (path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    wrong = faults(path, STEPS)
    assert any(line.startswith("replay of step 3: the ledger's notes: scaler is ") for line in wrong), wrong


@pytest.mark.full
def test_held_out_rewards_of_a_run_that_was_evaluated_in_several_ways_are_checked(cut, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(cut, path)
    resume(path, {"evaluation.every": 1, "evaluation.num_generations": 2, "evaluation.temperature": 1.0})
    findings = list(verify_run(path, STEPS, 0, {}))
    assert [f for f in findings if not f.holds] == []
    assert [f.what for f in findings if f.mark is Mark.NOT_COMPARED] == ["replays"]
    for step in (0, 4):  # evaluated in the first way, and in the second
        forged = tmp_path / f"step {step}"
        shutil.copytree(path, forged)
        lines = (forged / "metrics.jsonl").read_text().splitlines()
        name = "eval/reward" if step else "eval/base_reward"
        values = json.loads(lines[step])
        lines[step] = json.dumps(values | {name: math.nextafter(values[name], 2.0)})
        (forged / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        wrong = faults(forged, STEPS)
        assert any(line.startswith(f"replay of step {step}: metrics.jsonl: {name} is") for line in wrong), (
            wrong
        )


def test_a_kill_between_the_note_of_a_resume_and_config_toml_is_no_forgery(cut, tmp_path, monkeypatch):
    path = tmp_path / "run"
    shutil.copytree(cut, path)
    monkeypatch.setattr(run_module, "write_config", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        resume(path, {"evaluation.every": 3})
    monkeypatch.undo()
    assert faults(path, 0) == []
    config = path / "config.toml"
    config.write_text(re.sub(r"(\[evaluation\]\nevery = )2", r"\g<1>4", config.read_text()))
    assert len(faults(path, 0)) == 1
    resume(path)
    assert faults(path, 0) == []


def test_a_forged_accuracy_is_found_although_a_free_setting_was_changed_too(run, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(run, path)
    config = path / "config.toml"
    config.write_text(re.sub(r"(\[evaluation\]\nevery = )2", r"\g<1>3", config.read_text()))
    (line,) = faults(path, 0)
    assert re.search(r"^config.toml: evaluation.every is 3, and 2 in .*: the file was altered$", line)


def test_a_run_that_is_cut_is_not_finished(run, tmp_path):
    """The ledger, the logs and the checkpoints of 4 steps, with a summary that fits them."""
    path = tmp_path / "run"
    shutil.copytree(run, path)
    shutil.rmtree(path / "checkpoints" / "step-000005")
    for name, each in (("ledger.jsonl", 1), ("metrics.jsonl", 1), ("rollouts.jsonl", 9)):
        lines = (path / name).read_text().splitlines(keepends=True)
        (path / name).write_text("".join(lines[:-each]))
    ledger = read_ledger(path / "ledger.jsonl")
    checkpoint, _ = open_checkpoint(path / "checkpoints" / "step-000004")
    history = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    write_summary(path, derived_summary(ledger, history, checkpoint))
    assert faults(path, 0) == ["summary: of a run of 5 steps, of which the ledger holds 4"]


def notes(path: Path, replays: int) -> dict[str, str]:
    return {f.what: f.result for f in verify_run(path, replays, 0, {}) if f.mark == "note"}


@pytest.fixture(scope="module")
def unhashed(config, tmp_path_factory) -> Path:
    """A run whose ledger has no hash of any state."""
    path = tmp_path_factory.mktemp("unhashed") / "run"
    train(config(steps=STEPS, ledger__state_every=9, checkpoint__every=2, evaluation__every=2), path)
    return path


@pytest.mark.full
def test_what_no_hash_binds_is_said_and_is_no_ok(run, unhashed):
    message = "not checked: weights, optimizer's moments"
    assert [r for w, r in notes(unhashed, 0).items() if w.startswith("step-")] == [message] * 3
    assert notes(unhashed, 0)["replays"].startswith("none: ")
    assert set(notes(run, 0)) == {"replays"}
    assert set(notes(unhashed, STEPS)) == {"replays"}


@pytest.mark.parametrize("draw", DRAWS)
def test_final_weights_without_a_hash_are_those_of_the_last_step(unhashed, tmp_path, draw):
    """Whatever is drawn, the last step is done again, and its weights are compared with the checkpoint's."""
    path = tmp_path / "run"
    shutil.copytree(unhashed, path)
    assert faults(path, 1, draw) == []
    forge_weight(path, STEPS)
    assert faults(path, 0, draw) == []  # it is noted that nothing was compared
    assert faults(path, 1, draw) == [
        f"step-{STEPS:06d}: step {STEPS - 1}: weights, done again, are not the checkpoint's"
    ]


def test_the_newest_checkpoint_of_a_run_that_was_cut_is_bound_too(unhashed, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(unhashed, path)
    forget_end(path)
    assert faults(path, 1) == []
    forge_weight(path, 4)
    (path / "summary.json").unlink()
    assert "step-000004: step 3: weights, done again, are not the checkpoint's" in faults(path, 1)


@pytest.mark.parametrize("draw", DRAWS)
def test_a_last_step_that_is_wholly_forged_is_found_in_every_draw(run, tmp_path, draw):
    path = tmp_path / "run"
    shutil.copytree(run, path)
    chain_again(path, STEPS - 1, lambda hashes: hashes.update(gradient="f" * 64))
    assert faults(path, 0, draw) == []
    (line,) = faults(path, 1, draw)
    assert line.startswith(f"replay of step {STEPS - 1}: differs at step {STEPS - 1}: gradient")


def another_problem(lines: list[dict]) -> None:
    """The same prompt three times, where the step has three."""
    for i, line in enumerate(lines):
        line |= {k: lines[i % 3][k] for k in ("problem", "prompt_text", "prompt_ids")}


ROLLOUTS = {
    "reward": (all_solved, "reward is 1.0, and its problem and tokens give 0."),
    "advantage": (
        lambda lines: lines[4].update(advantage=0.5),
        "sample 1: advantage is 0.5, and the rewards give",
    ),
    "problem": (another_problem, "the ids before turn 0 are not those of its problem"),
}


@pytest.mark.parametrize("what", ROLLOUTS)
def test_what_follows_from_tokens_is_derived_in_every_step(run, tmp_path, what):
    """No step is done again here: every hash is right, and rewards do not follow from the tokens."""
    path, (change, words) = tmp_path / "run", ROLLOUTS[what]
    shutil.copytree(run, path)
    forge_rollouts(path, 1, change)
    (line,) = faults(path, 0)
    assert line.startswith("rewards: rollouts.jsonl, step 1: prompt ")
    assert words in line


def into_config(**changes: Any) -> Callable[[Path], Any]:
    return lambda folder: forge_file(folder, "config.json", lambda x: x.update(changes))


def other_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


FOREIGN = {
    "auto_map": into_config(auto_map={"AutoModelForCausalLM": "modeling_x.Model"}),
    "modeling_x.py": lambda folder: (folder / "modeling_x.py").write_text("class Model: ..."),
    "pytorch_model.bin": lambda folder: (folder / "pytorch_model.bin").write_bytes(b"pickle"),
    "trainer/rng.pt": lambda folder: (folder / "trainer" / "rng.pt").write_bytes(b"pickle"),
    "eos_token_id": into_config(eos_token_id=7),
    "pad_token_id": into_config(pad_token_id=7),
    "max_position_embeddings": into_config(max_position_embeddings=1 << 20),
    "model-00002-of-00002.safetensors": lambda folder: shutil.copy(
        folder / "model.safetensors", folder / "model-00002-of-00002.safetensors"
    ),
    "nowhere": lambda folder: (folder / "nowhere").symlink_to("/nowhere"),
    "lm_head.weight": other_tensor,
}


@pytest.mark.full
@pytest.mark.parametrize("what", FOREIGN)
def test_what_a_loader_would_read_of_a_checkpoint_is_bound(run, tmp_path, what):
    path = tmp_path / "run"
    shutil.copytree(run, path)
    folder = path / "checkpoints" / "step-000004"
    FOREIGN[what](folder)
    forge_manifest(folder)
    lines = faults(path, 0)
    assert [what in line and line.startswith("step-000004: ") for line in lines] == [True]


def without_evaluations(path: Path, setting: bool) -> None:
    """No evaluation in the metrics; with `setting`, the run says that it had none."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in rows]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if setting:
        config = path / "config.toml"
        config.write_text(re.sub(r"(\[evaluation\]\nevery = )2", r"\g<1>0", config.read_text()))
        forge_head(path, lambda head: head["environment"].update({"process.evaluation.every": 0}))
    chain_again(path, 0, lambda quantities: None)


@pytest.mark.full
def test_evaluations_that_vanish_are_no_ok(run, tmp_path):
    assert "evaluations" not in notes(run, 0)
    for setting in (False, True):
        path = tmp_path / str(setting)
        shutil.copytree(run, path)
        without_evaluations(path, setting)
        wrong = faults(path, 0)
        assert wrong == ([] if setting else ["evaluations: step 0 lacks eval/base_reward in metrics.jsonl"])
        assert notes(path, 0).get("evaluations", "").startswith("none: evaluation is off" if setting else "")
