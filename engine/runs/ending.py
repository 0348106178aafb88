"""What is printed when a run has ended: how it went, and the commands that a person wants next."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from ..config.config_file import load_config
from .folder import METRICS
from .held_out import held_out_name
from .ledger_head import is_free
from .loaded import read_metrics
from .signal import no_signal_steps
from .summary import Summary, last_steps

# The label of a command and the command, in two columns.
_LABEL = 18


def figures(summary: Summary, folder: Path) -> Iterator[str]:
    """How a finished run in `folder` went, a line for each figure."""
    s = summary
    last = f"{last_steps(s.steps)} {s.reward_last5:.3f}"
    yield f"reward {s.reward_first:.3f} -> {s.reward_last:.3f} ({last})"
    if s.held_out_reward is not None:
        yield f"{held_out_name(s.held_out_accuracy is not None)} {s.held_out_reward:.3f}"
    if line := no_signal_steps(read_metrics(folder / METRICS).get("grad_norm", [])):
        yield line
    unequal = f", {s.tokens_unequal} of them unequal" if s.tokens_unequal else ""
    yield f"mismatch {s.mismatch_max_abs} over {s.tokens} tokens{unequal}"
    yield f"weights {s.weights}"
    yield f"fingerprint {s.fingerprint}"


def next_commands(folder: Path) -> Iterator[str]:
    """The commands for a finished run: to do it again, to compare, to check, and to go on."""
    config, again = load_config(str(folder / "config.toml")), folder.with_name(f"{folder.name}-again")
    yield _command("run it again", "train", folder / "config.toml", "--run_dir", again)
    yield _command("compare the two", "diff", folder, again)
    yield _command("check it", "verify", "run", folder)
    if is_free("steps", config):  # a schedule over the steps would make other bits
        yield _command("train it further", "train", "--resume", folder, "--steps", 2 * config.steps)


def after_stop(folder: Path, step: int) -> Iterator[str]:
    """The lines for a run that ended early, as Ctrl-C asked for, when `step` steps were done."""
    config = load_config(str(folder / "config.toml"))
    checkpoint = folder / "checkpoints" / f"step-{step:06d}"
    yield f"stopped after {step} of {config.steps} steps; checkpoint {checkpoint}"
    if config.samples_older_weights:
        yield "no checkpoint holds the older weights that it samples from: it goes on from its first step"
    yield from after_interrupt(folder)


def after_interrupt(folder: Path) -> Iterator[str]:
    """The commands for a run that is not finished."""
    yield _command("go on, to the bit", "train", "--resume", folder)
    yield _command("look at it", "report", folder)


def _command(label: str, *words: object) -> str:
    return f"{label:<{_LABEL}} zerokl {shlex.join(map(str, words))}"
