"""The files of a run: its configuration, metrics, rollouts, TensorBoard files and plot."""

import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...verify.files import write_whole
from ...verify.ledger import LEDGER
from ..train.state import StepRecord

METRICS, ROLLOUTS = "metrics.jsonl", "rollouts.jsonl"
# What a folder holds only if it is the folder of a run.
_RUN_FILES = (
    "config.toml",
    LEDGER,
    METRICS,
    ROLLOUTS,
    "checkpoints",
    "summary.json",
    "reward.png",
    "tensorboard",
    "mismatch",
)


def refuse_taken(path: Path) -> None:
    """Raise ValueError when the folder already holds a run."""
    present = [name for name in _RUN_FILES if (path / name).exists()]
    if present:
        raise ValueError(f"run: {path} already holds a run ({present[0]}); choose another --run_dir")


def finite(x: Any) -> Any:
    """A copy of x for JSON, which has no infinities and no NaN: they become null.

    x: dicts, lists and values.
    """
    if isinstance(x, dict):
        return {k: finite(v) for k, v in x.items()}
    if isinstance(x, list):
        return [finite(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


class _Log:
    """A JSONL file to which lines are appended, and the hash of its content."""

    def __init__(self, path: Path):
        self.path = path
        self._hash = hashlib.sha256(path.read_bytes() if path.exists() else b"")
        self._file = open(path, "ab")

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        self._hash.update(content)
        self._file.write(content)
        self._file.flush()

    def sync(self) -> str:
        os.fsync(self._file.fileno())
        return self._hash.hexdigest()

    def close(self) -> None:
        self._file.close()


class RunFolder:
    """The files of a run in the folder `path`."""

    def __init__(self, path: Path, config_toml: str, steps_done: int | None = None):
        """steps_done: of a run that goes on; None for a new run.

        Raises ValueError for a new run in a folder that already holds one. No run is ever overwritten.
        """
        self.path = path
        if steps_done is None:
            refuse_taken(path)
            path.mkdir(parents=True, exist_ok=True)
        write_whole(path / "config.toml", config_toml.encode())
        self._metrics = _Log(path / METRICS)
        self._rollouts = _Log(path / ROLLOUTS)
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard then ignores what the interrupted run wrote about later steps.
        self._board = SummaryWriter(str(path / "tensorboard"), purge_step=steps_done)

    def record(self, record: StepRecord, extra: dict[str, float]) -> None:
        """Append the metrics and rollouts of a finished step. extra: further metrics of it."""
        metrics = record.metrics | extra
        self._metrics.write([finite(metrics | record.notes)])
        for name, value in metrics.items():
            if name != "step":
                self._board.add_scalar(name, value, int(metrics["step"]))
        P, G = record.rewards.shape
        self._rollouts.write([rollout_line(record, p, g, G) for p in range(P) for g in range(G)])

    def sync(self) -> dict[str, str]:
        """Wait until metrics and rollouts are on the disk. Returns file name -> SHA-256 of the file so far.

        A checkpoint must never be ahead of these files.
        """
        return {log.path.name: log.sync() for log in (self._metrics, self._rollouts)}

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        self._rollouts.close()
        self._board.close()


class NoFolder:
    """Takes the place of a RunFolder in a rank that writes nothing."""

    def record(self, record: StepRecord, extra: dict[str, float]) -> None:
        """Do nothing."""

    def sync(self) -> dict[str, str]:
        """Do nothing."""
        return {}

    def close(self) -> None:
        """Do nothing."""


def rollout_line(record: StepRecord, p: int, g: int, G: int) -> dict[str, Any]:
    """The line of rollouts.jsonl for generation g of prompt p; each prompt has G generations."""
    r = record.rollouts[p * G + g]
    return {
        "step": record.metrics["step"],
        "prompt": p,
        "sample": g,
        "problem": record.problems[p].id,
        "prompt_text": record.problems[p].prompt,
        "text": record.texts[p][g],
        "reward": float(record.rewards[p, g]),
        "advantage": float(record.advantages[p, g]),
        "finish": r.finish,
        "weight_version": r.weight_version,
        "prompt_ids": list(r.prompt_ids),
        "completion_ids": list(r.completion_ids),
        "logprobs": [float(x) for x in r.logprobs],
    }


def plot_reward(metrics: list[dict[str, float]], path: Path) -> None:
    """Write a picture with reward, held-out accuracy and mismatch by step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps = [m["step"] for m in metrics]
    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=(7, 5), height_ratios=[3, 1], layout="constrained"
    )
    above.plot(steps, [m["reward/mean"] for m in metrics], label="training reward")
    evaluations = [(m["step"], m["eval/accuracy"]) for m in metrics if "eval/accuracy" in m]
    if evaluations:
        above.plot(*zip(*evaluations, strict=True), "o-", label="held-out accuracy")
    above.set_ylabel("reward")
    above.set_ylim(bottom=min(0.0, *(m["reward/mean"] for m in metrics)))
    above.grid(alpha=0.3)
    above.legend(loc="lower right")
    below.plot(steps, [m["mismatch/max_abs"] for m in metrics], color="tab:red")
    below.set_ylabel("max |Δlogp|\ntrainer − sampler")
    below.set_xlabel("step")
    below.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
