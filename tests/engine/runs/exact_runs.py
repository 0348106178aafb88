"""What an exact run must do, and the first step of a run beside transformers' gradient of it."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM
from zerokl.engine.config.run_config import Config
from zerokl.engine.runs.checks.verify_run import verify_run
from zerokl.engine.runs.run import resume, train
from zerokl.engine.runs.setup import make_state, run_judge
from zerokl.engine.runs.summary import Summary
from zerokl.engine.tasks.loading import load_task
from zerokl.engine.train.collect import RolloutBatch, collect
from zerokl.engine.train.prepare import Prepared, prepare
from zerokl.engine.train.shard import ShardWork
from zerokl.engine.train.state import TrainState

from tests.helpers import assert_gradient_at_most_twice_the_error


def train_exactly(config: Config, path: Path) -> Summary:
    """Train, with the same bits in sampler and trainer."""
    summary = train(config, path)
    assert (summary.tokens_unequal, summary.mismatch_max_abs) == (0, 0.0)
    return summary


def train_with_gradients(config: Config, path: Path) -> Path:
    """The folder of a run whose bits are the same in both, and of which each step has a gradient."""
    train_exactly(config, path)
    assert all(json.loads(line)["grad_norm"] > 0 for line in (path / "metrics.jsonl").open())
    return path


def forget_end(path: Path) -> None:
    """Let a finished run be one that ended before its last checkpoint."""
    shutil.rmtree(max((path / "checkpoints").iterdir()))
    (path / "summary.json").unlink()


def faults(path: Path, replays: int = 2, draw: int = 0) -> list[str]:
    """What a verification of a run finds wrong; see verify_run."""
    return [f"{f.what}: {f.result}" for f in verify_run(path, replays, draw, {}) if not f.holds]


def assert_done_again(run: Summary, path: Path, make: Callable[..., Config], **settings: object) -> None:
    """A run is verified, comes out the same however its work is cut, and goes on from its middle.

    make: gives the run's configuration for these settings, without its checkpoints.
    """
    assert faults(path) == []
    cut_up = make(**settings, workers=2, micro_batch=1, shards_in_flight=2)
    other = train(cut_up, path.with_name("cut otherwise"))
    assert (other.fingerprint, other.weights) == (run.fingerprint, run.weights)
    forget_end(path)
    assert resume(path).fingerprint == run.fingerprint


@contextmanager
def first_state(config: Config) -> Iterator[TrainState]:
    """The state of a run before its first step."""
    task = load_task(config.task.name, config.task.options, config.task.directory)
    with (
        run_judge(config, task) as judge,
        closing(make_state(config, Path(config.model), task, judge)) as state,
    ):
        yield state


def first_gradient(state: TrainState, config: Config) -> tuple[RolloutBatch, Prepared, torch.Tensor]:
    """The first step's batch, what is trained on, and its gradient."""
    batch = collect(state)
    prepared = prepare(state, batch)
    work = ShardWork(config.sampling.sampling_params, config.loss, 16)
    _, gradient = state.parallel.sum_shards(work, prepared.shard.cut(config.virtual_shards))
    return batch, prepared, gradient.clone()


def assert_gradient_of_transformers(
    views: Mapping[str, torch.Tensor], model: str, loss: Callable[[Qwen3ForCausalLM], torch.Tensor]
) -> None:
    """The gradient of each weight is that of a loss over transformers' model, by fp64."""

    def gradient_in(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        policy = Qwen3ForCausalLM.from_pretrained(model, dtype=dtype)
        policy.model.embed_tokens.padding_idx = None  # torch gives the padding token no gradient as an input
        loss(policy).backward()
        return {name: w.grad for name, w in policy.named_parameters() if w.grad is not None}

    assert_gradient_at_most_twice_the_error(views, gradient_in(torch.float32), gradient_in(torch.float64))
