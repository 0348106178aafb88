"""A run that was interrupted goes on to the same bits, whatever is left of it; a damaged file is named."""

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zerokl.engine.config.run_config import Config
from zerokl.engine.runs import run as run_module
from zerokl.engine.runs.checks.replayer import Replayer
from zerokl.engine.runs.checks.verify_run import verify_run
from zerokl.engine.runs.intact_checkpoints import open_checkpoint
from zerokl.engine.runs.run import Summary, begin_or_resume, resume, train
from zerokl.files.writing import hash_json, hold_folder

from tests.forged_run import forge_manifest
from tests.helpers import contents, property_settings

LOGS = ("ledger.jsonl", "metrics.jsonl", "rollouts.jsonl")


class StopError(Exception):
    """The run ends here, as if it had been killed."""


def _interrupted(config: Config, path: Path, step: int, start=train) -> None:
    """A run that ends in the middle of `step`: only the ledger's line of this step is written."""
    train_step = run_module.train_step

    def stopped(state, recorder):
        record = train_step(state, recorder)
        if state.step == step + 1:
            raise StopError
        return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "train_step", stopped)
        with pytest.raises(StopError):
            start(config, path)


@pytest.fixture(
    scope="module",
    params=[
        "float32",
        *(
            pytest.param(x, marks=m)
            for x, m in (("bfloat16", pytest.mark.proof), ("float16", pytest.mark.full))
        ),
    ],
)
def six_steps(request, config):
    return config(
        dtype=request.param, steps=6, checkpoint__every=2, optimizer__schedule="linear", updates_per_rollout=2
    )


@pytest.fixture(scope="module")
def whole(six_steps, tmp_path_factory) -> tuple[Path, Summary]:
    path = tmp_path_factory.mktemp("whole") / "run"
    return path, train(six_steps, path)


def _same_run(path: Path, summary: Summary, whole: tuple[Path, Summary], rollouts_from: int = 0) -> None:
    """Ledger and rollouts are byte for byte those of the run that was never interrupted.

    The metrics are equal but for the times. rollouts_from: the step at which rollouts.jsonl begins.
    """
    whole_path, expected = whole
    assert (summary.fingerprint, summary.weights) == (expected.fingerprint, expected.weights)
    assert summary.steps == 6
    assert (path / "ledger.jsonl").read_bytes() == (whole_path / "ledger.jsonl").read_bytes()
    lines = (whole_path / "rollouts.jsonl").read_bytes().splitlines(keepends=True)
    expected_lines = [line for line in lines if json.loads(line)["step"] >= rollouts_from]
    assert (path / "rollouts.jsonl").read_bytes() == b"".join(expected_lines)
    assert _metrics_without_times(path) == _metrics_without_times(whole_path)


def _metrics_without_times(path: Path) -> list[dict]:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").open()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "perf/"))} for line in lines]


@pytest.mark.parametrize("step", [4, *(pytest.param(step, marks=pytest.mark.full) for step in (0, 1, 2, 5))])
def test_a_run_that_was_cut_goes_on_to_the_same_ledger(six_steps, whole, tmp_path, monkeypatch, step):
    _interrupted(six_steps, tmp_path / "run", step)
    assert not (tmp_path / "run" / "summary.json").exists()
    _same_run(tmp_path / "run", resume(tmp_path / "run"), whole)


@pytest.mark.full
def test_control_without_the_moments_the_ledger_differs(six_steps, whole, tmp_path, monkeypatch):
    _interrupted(six_steps, tmp_path / "run", 3)
    restore = run_module.restore

    def without_moments(state, checkpoint):
        restore(state, checkpoint)
        state.optimizer.moments[0].zero_()

    monkeypatch.setattr(run_module, "restore", without_moments)
    assert resume(tmp_path / "run").fingerprint != whole[1].fingerprint


def test_a_finished_run_that_is_resumed_stays_as_it_is(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "run")
    _same_run(tmp_path / "run", resume(tmp_path / "run"), whole)


@pytest.mark.full
def test_settings_that_decide_no_bit_may_change(six_steps, whole, tmp_path, monkeypatch):
    _interrupted(six_steps, tmp_path / "run", 3)
    settings = {"workers": "2", "micro_batch": "1", "native.max_concurrency": "2", "threads": "2"}
    settings |= {"memory.offload": "disk"}
    summary = resume(tmp_path / "run", settings)
    assert (summary.fingerprint, summary.weights) == (whole[1].fingerprint, whole[1].weights)
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "run" / "ledger.jsonl").open()]
    assert kinds == ["head", "step", "step", "resumed", "step", "step", "step", "step"]


def test_settings_that_decide_bits_are_refused_by_name(config, tmp_path):
    path = tmp_path / "run"
    train(config(optimizer__schedule="linear"), path)
    before = contents(path)
    settings = {"seed": "1", "optimizer.lr": "1e-3", "virtual_shards": "1", "steps": "9"}
    for name, value in (settings | {"precision.scale": "2.0", "dtype": "float16"}).items():
        with pytest.raises(ValueError, match=f"^run: {name} .*decides bits"):
            resume(path, {name: value})
        assert contents(path) == before


@pytest.mark.full
@pytest.mark.parametrize(
    "older",
    [pytest.param({"max_staleness": 2}, marks=pytest.mark.full), {"perturb__delay": 2, "exact": False}],
    ids=str,
)
def test_a_run_with_older_weights_is_done_again_from_its_first_step(
    config, tmp_path, monkeypatch, capsys, older
):
    cfg = config(steps=5, checkpoint__every=1, **older)
    expected = train(cfg, tmp_path / "whole").fingerprint
    _interrupted(cfg, tmp_path / "run", 3)
    assert resume(tmp_path / "run").fingerprint == expected
    assert "step-000003 does not hold the older weights" in " ".join(capsys.readouterr().out.split())
    with Replayer(tmp_path / "whole") as replayer:
        assert [replayer.replay(step).difference for step in (4, 2)] == [None, None]


def test_a_run_at_a_constant_rate_can_be_made_longer(config, tmp_path):
    train(config(steps=3), tmp_path / "run")
    longer = train(config(steps=5), tmp_path / "longer")
    assert resume(tmp_path / "run", {"steps": "5"}).fingerprint == longer.fingerprint


def test_only_the_newest_checkpoints_are_kept(config, tmp_path):
    train(config(steps=5, checkpoint__every=1, checkpoint__keep=2), tmp_path / "run")
    checkpoints = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert checkpoints == ["step-000004", "step-000005"]


def _cut_in_step(path: Path, step: int) -> None:
    """Leave the folder as a kill in `step` does: half a line of each log, half a checkpoint, no summary."""
    for name, lines in zip(LOGS, (1 + step, step, 9 * step), strict=True):
        content = (path / name).read_bytes().splitlines(keepends=True)
        (path / name).write_bytes(b"".join(content[:lines]) + content[lines][:17])
    for folder in (path / "checkpoints").iterdir():
        if int(folder.name[5:]) > step:
            shutil.rmtree(folder)
    half = path / "checkpoints" / f".step-{step:06d}.partial-1"
    half.mkdir()
    (half / "config.json").write_text("{")
    (path / "summary.json").unlink()


@pytest.fixture(scope="module")
def small(config, tmp_path_factory) -> tuple[Path, Summary]:
    path = tmp_path_factory.mktemp("small") / "run"
    return path, train(config(steps=6, checkpoint__every=2), path)


def test_a_newer_checkpoint_that_is_damaged_is_named_and_an_older_one_used(small, tmp_path, capsys):
    path = tmp_path / "run"
    shutil.copytree(small[0], path)
    _cut_in_step(path, 5)
    victim = path / "checkpoints" / "step-000004" / "trainer" / "state.safetensors"
    victim.write_bytes(victim.read_bytes()[:-9])
    _same_run(path, resume(path), small)
    output = " ".join(capsys.readouterr().out.split())
    assert f"{victim} is torn" in output
    assert "going on at step 2 of 6" in output
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == [
        "step-000002",
        "step-000004",
        "step-000004.damaged",
        "step-000006",
    ]


# How many lines of each log the checkpoint after four steps rests on.
LINES_NEEDED = {"ledger.jsonl": 5, "metrics.jsonl": 4, "rollouts.jsonl": 36}
CORRUPTIONS = st.sampled_from(["truncate", "flip", "remove", "replace"])


@pytest.mark.full
@given(st.booleans(), st.integers(0, 10**9), st.integers(0, 10**9), CORRUPTIONS)
@property_settings(40)
def test_whatever_is_corrupted_is_named_and_the_run_still_ends_the_same(
    small, tmp_path_factory, log, file, place, how
):
    """One file of an interrupted run is corrupted at a random place.

    The file is named, and the run ends in the same bits or is refused.
    """
    path = tmp_path_factory.mktemp("corrupted") / "run"
    shutil.copytree(small[0], path, ignore=shutil.ignore_patterns("tensorboard"))
    _cut_in_step(path, 5)
    files = [p for p in sorted(path.rglob("*")) if p.is_file() and (p.name in LOGS) == log]
    files = [p for p in files if ".partial" not in str(p)]
    victim = files[file % len(files)]
    corrupt(victim, place, how)
    left, refusal, output = victim.read_bytes() if victim.exists() else b"", "", io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            summary = resume(path)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert len(refusal.splitlines()) == 1
        # Every other file that is needed is kept twice.
        assert victim.name == "config.toml", refusal
        return
    assert (summary.fingerprint, summary.weights) == (small[1].fingerprint, small[1].weights)
    if victim.name != "config.toml":
        _same_run(path, summary, small, rollouts_from=4 if _lost_whole(victim, how, left) else 0)
    if log and _is_needed_part_changed(small[0] / victim.name, left):
        assert victim.name in output.getvalue()
        _assert_kept(victim, path / f"{victim.name}.damaged", left)
    elif "step-000004" in str(victim):
        checkpoint = path / "checkpoints" / "step-000004"
        assert f"{checkpoint}" in "".join(output.getvalue().split())
        damaged = checkpoint.with_name("step-000004.damaged") / victim.relative_to(checkpoint)
        assert how == "remove" or damaged.read_bytes() == left


def _lost_whole(victim: Path, how: str, left: bytes) -> bool:
    """Whether no whole step is left of rollouts.jsonl, so that it begins where the run goes on."""
    one_step = LINES_NEEDED["rollouts.jsonl"] // 4
    return victim.name == "rollouts.jsonl" and how in ("remove", "truncate") and left.count(b"\n") < one_step


def _is_needed_part_changed(log: Path, left: bytes) -> bool:
    """Whether `left`, what is left of a log, differs in the lines that the newest checkpoint rests on."""
    needed = b"".join(log.read_bytes().splitlines(keepends=True)[: LINES_NEEDED[log.name]])
    return left[: len(needed)] != needed


def _assert_kept(log: Path, damaged: Path, left: bytes) -> None:
    """A damaged log is kept beside the log, or the log still begins with it."""
    assert damaged.read_bytes() == left if damaged.exists() else log.read_bytes().startswith(left)


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl"])
def test_an_altered_number_in_a_log_is_named_and_the_altered_file_kept(small, tmp_path, capsys, name):
    path = tmp_path / "run"
    shutil.copytree(small[0], path)
    _cut_in_step(path, 5)
    content = bytearray((path / name).read_bytes())
    # A digit in the line of the second step. It is still a digit afterwards.
    digit = content.index(b"0.", content.index(b"\n") + 1) + 2
    content[digit] ^= 1
    (path / name).write_bytes(content)
    _same_run(path, resume(path), small)
    output = " ".join(capsys.readouterr().out.split())
    assert f"{path / name} was altered before step 4" in output
    assert "going on at step 0 of 6" in output
    assert (path / f"{name}.damaged").read_bytes() == bytes(content)


def test_a_ledger_of_another_format_is_refused_and_nothing_changes(small, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(small[0], path)
    head, _, steps = (path / "ledger.jsonl").read_text().partition("\n")
    line = json.loads(head) | {"format": 2}
    del line["sum"]
    (path / "ledger.jsonl").write_text(json.dumps(line | {"sum": hash_json(line)}) + "\n" + steps)
    before = contents(path)
    message = r"has format 2, this zerokl reads 6; use the version that wrote it$"
    for read in (resume, Replayer):
        with pytest.raises(ValueError, match=rf"^ledger: .*ledger.jsonl {message}"):
            read(path)
    assert contents(path) == before


def test_what_a_damaged_ledger_has_done_again_is_kept(small, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(small[0], path)
    before = {name: (path / name).read_bytes() for name in LOGS}
    corrupt(path / "ledger.jsonl", 8 * 300, "flip")
    _same_run(path, resume(path), small)
    kept = {name: (path / f"{name}.damaged").read_bytes() for name in LOGS}
    assert [name for name in LOGS if kept[name] != before[name]] == ["ledger.jsonl"]


@pytest.mark.parametrize(
    ("file", "what"), [("model.safetensors", "weights"), ("trainer/state.safetensors", "optimizer's moments")]
)
def test_a_checkpoint_with_other_bits_than_the_ledgers_is_not_used(small, tmp_path, capsys, file, what):
    """Such a checkpoint is what a write leaves that went wrong before its bytes were hashed."""
    path = tmp_path / "run"
    shutil.copytree(small[0], path)
    folder = path / "checkpoints" / "step-000004"
    # Not at the end of the file, which may be padding.
    corrupt(folder / file, 6 * (folder / file).stat().st_size, "flip")
    forge_manifest(folder)
    assert open_checkpoint(folder)[0] is not None
    message = f"the {what} in {folder} are not those whose hash is in {path / 'ledger.jsonl'}"
    assert [f.result for f in verify_run(path, 0, 0, {}) if not f.holds] == [message]
    _cut_in_step(path, 5)
    _same_run(path, resume(path), small)
    assert f"{message}; not used" in " ".join(capsys.readouterr().out.split())


def test_a_run_that_another_process_writes_is_left_alone(small, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(small[0], path)
    _cut_in_step(path, 5)
    before = contents(path)
    message = r"^run: .*run is being written to by process \d+ of .*; end it first"
    with hold_folder(path), pytest.raises(ValueError, match=message):
        resume(path)
    assert contents(path) == before
    _same_run(path, resume(path), small)


def corrupt(victim: Path, place: int, how: str) -> None:
    """Truncate the file at byte `place`, flip bit number `place`, remove the file, or replace its content."""
    content = bytearray(victim.read_bytes())
    if how == "truncate":
        victim.write_bytes(content[: place % len(content)])
    elif how == "flip":
        content[place // 8 % len(content)] ^= 1 << place % 8
        victim.write_bytes(content)
    elif how == "remove":
        victim.unlink()
    else:
        victim.write_bytes(b'{"from": "another program"}\n')


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no run .*--run_dir"):
        resume(tmp_path)


def test_other_data_and_other_first_weights_are_refused(config, model, tmp_path):
    data, base = tmp_path / "data.jsonl", tmp_path / "base"
    shutil.copytree(model, base)
    problems = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(20)]
    data.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    cfg = config(model=base, task__name="jsonl", task__options={"file": str(data)})
    train(cfg, tmp_path / "run")
    data.write_text(data.read_text().replace("3+1=", "4+1=", 1))
    with pytest.raises(ValueError, match="training problems are not those of the run"):
        resume(tmp_path / "run", {"steps": "4"})
    data.write_text(data.read_text().replace("4+1=", "3+1=", 1))
    content = bytearray((base / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (base / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"weights of .* are not those that the run began with"):
        resume(tmp_path / "run", {"steps": "4"})


def test_the_same_command_begins_a_run_and_goes_on_with_it(config, tmp_path):
    """A setting that decides no bit may be another one; one that decides bits may not."""
    cfg, path = config(steps=4, checkpoint__every=1), tmp_path / "run"
    whole = train(cfg, tmp_path / "whole")
    _interrupted(cfg, path, 2, begin_or_resume)
    with pytest.raises(ValueError, match=r"seed \(1, was 0\) decides bits"):
        begin_or_resume(cfg.model_copy(update={"seed": 1}), path)
    summary = begin_or_resume(cfg.model_copy(update={"micro_batch": 2}), path)
    assert (summary.fingerprint, summary.weights) == (whole.fingerprint, whole.weights)
    ledger = (path / "ledger.jsonl").read_bytes()
    assert begin_or_resume(cfg, path).fingerprint == whole.fingerprint
    assert (path / "ledger.jsonl").read_bytes() == ledger
