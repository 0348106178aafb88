"""Ctrl-C during training: once it ends after the step with a checkpoint, twice at once; no bit changes."""

import os
import signal

import pytest
from zerokl.cli import main
from zerokl.engine.config.config_file import to_toml
from zerokl.engine.display.interrupt import FirstInterrupt, StoppedError
from zerokl.engine.runs import run as run_module
from zerokl.engine.runs.run import resume, train


@pytest.fixture
def press(monkeypatch):
    """press(step, times): Ctrl-C so many times while the step is taken."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test runner may have its own
    take_step = run_module.train_step

    def prepare(step: int, times: int) -> None:
        def pressed(state, recorder):
            for _ in range(times if state.step == step else 0):
                os.kill(os.getpid(), signal.SIGINT)
            return take_step(state, recorder)

        monkeypatch.setattr(run_module, "train_step", pressed)

    yield prepare
    signal.signal(signal.SIGINT, before)


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("times", [1, 2])
def test_a_run_ended_by_ctrl_c_goes_on_to_the_same_bits(config, tmp_path, press, workers, times):
    cfg = config(steps=5, workers=workers, checkpoint__every=0, evaluation__every=2)
    expected = train(cfg, tmp_path / "alone")
    press(2, times)
    with pytest.raises(StoppedError if times == 1 else KeyboardInterrupt) as raised:
        train(cfg, tmp_path / "run")
    assert isinstance(raised.value, StoppedError) == (times == 1)
    checkpoints = [p.name for p in (tmp_path / "run" / "checkpoints").glob("*")]
    assert checkpoints == (["step-000003"] if times == 1 else [])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    press(-1, 0)
    summary = resume(tmp_path / "run")
    assert (summary.fingerprint, summary.weights) == (expected.fingerprint, expected.weights)
    for name in ("ledger.jsonl", "rollouts.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes(), name


def test_in_the_last_step_it_changes_nothing(config, tmp_path, press):
    press(1, 1)
    assert train(config(steps=2), tmp_path / "run").steps == 2


@pytest.mark.parametrize(
    ("times", "first"), [(1, "stopped after 2 of 4 steps; checkpoint "), (2, "go on, to the")]
)
def test_the_command_says_how_to_go_on(config, tmp_path, press, capsys, times, first):
    (tmp_path / "c.toml").write_text(to_toml(config(steps=4)))
    press(1, times)
    assert main(["train", str(tmp_path / "c.toml"), "--run_dir", str(tmp_path / "run")]) == 130
    out, error = capsys.readouterr()
    assert error == "zerokl: interrupted\n"
    *_, go_on, look = out.splitlines()
    assert any(line.startswith(first) for line in out.splitlines())
    assert go_on == f"go on, to the bit  zerokl train --resume {tmp_path / 'run'}"
    assert look == f"look at it         zerokl report {tmp_path / 'run'}"
    assert main(look.split()[4:]) == 0
    press(-1, 0)
    assert main(go_on.split()[6:]) == 0


def test_before_the_first_step_is_done_ctrl_c_twice_leaves_nothing(config, tmp_path, press):
    press(0, 2)
    with pytest.raises(KeyboardInterrupt):
        train(config(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_samples_older_weights_says_that_it_goes_on_from_its_first_step(
    config, tmp_path, press, capsys
):
    (tmp_path / "c.toml").write_text(to_toml(config(steps=4, exact=False, perturb__delay=1)))
    press(1, 1)
    assert main(["train", str(tmp_path / "c.toml"), "--run_dir", str(tmp_path / "run")]) == 130
    assert "it goes on from its first step" in capsys.readouterr().out


def test_a_handler_of_the_caller_stays(press):
    calls = []

    def handler(number, frame):
        calls.append(number)

    signal.signal(signal.SIGINT, handler)
    with FirstInterrupt(lambda: None) as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is handler
    assert (calls, interrupt.seen) == ([signal.SIGINT], False)
