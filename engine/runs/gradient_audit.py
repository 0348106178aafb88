"""`zerokl audit RUN --gradient N`: the gradient's bias at a checkpoint of a run, for a pair of engines.

N sets of rollouts of the run's next prompts are drawn by the sampler, and N by the trainer's policy. The
loss, the task and its rewards are the run's. verify/bias_figures.py has the figures.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from ...kernels.philox import Stream
from ...verify.bias_figures import Bias, DrawnBias, check_draws, estimate, of_exact
from ...verify.compare_runs import open_run
from ...verify.run_files import checkpoint_folders
from ..config.compatibility import check_settings
from ..config.config_file import validation_message
from ..config.perturb_section import PerturbConfig
from ..config.run_config import Config, MonitorConfig, ParallelConfig, PoolConfig
from ..display.progress import silent
from ..rollout.types import RngKey
from ..tasks.loading import load_task
from ..train.gradient_bias import drawn, exact_gradient, loss_products, measured_losses
from ..train.parallel.inner_products import WHOLE
from ..train.state import TrainState
from .base_model import base_model
from .intact_checkpoints import checked_checkpoint
from .resume import run_config
from .setup import make_state, run_equivalence, run_judge, settled
from .trainer_state import Checkpoint, restore


class Pair(NamedTuple):
    """The two engines. sampler: as in a configuration. dtypes as in an audit; head: of the logits."""

    sampler: str
    dtype: str
    sampler_dtype: str
    head_dtype: str
    sampler_head_dtype: str


class Target(NamedTuple):
    """What is measured: a run, and the checkpoint; None where it has none, and its first model is taken."""

    run: Path
    checkpoint: Checkpoint | None
    model: Path  # the folder of the checkpoint, or of the first model


def find_target(path: Path) -> Target:
    """The newest checkpoint of a run, or the one that is named. path: RUN, or RUN/checkpoints/step-NNNNNN.

    Raises ValueError for a folder without a run, and for a checkpoint that is damaged or not of its run.
    """
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    config, ledger = run_config(run, {}), open_run(run)
    folders = checkpoint_folders(run) if run == path else [path]
    if not folders:
        return Target(run, None, base_model(config, run))
    checkpoint, damage = checked_checkpoint(folders[0], ledger)
    if checkpoint is None:
        raise ValueError(f"audit: {damage}")
    return Target(run, checkpoint, folders[0])


def pair_config(run: Path, pair: Pair) -> Config:
    """The run's configuration with these engines in place of its own.

    Nothing makes them differ but themselves: the run's perturbations and its staleness are left out. Raises
    ValueError for engines that no run can have (see check_settings).
    """
    config = run_config(run, {})
    head = "compute" if pair.head_dtype == pair.dtype else pair.head_dtype
    sampler_head = "compute" if pair.sampler_head_dtype == pair.sampler_dtype else pair.sampler_head_dtype
    precision = config.precision.model_copy(
        update={
            "head_dtype": head,
            "sampler_dtype": "" if pair.sampler_dtype == pair.dtype else pair.sampler_dtype,
            "sampler_head_dtype": "" if sampler_head == head else sampler_head,
        }
    )
    changes = {
        "dtype": pair.dtype,
        "sampler": pair.sampler,
        "exact": False,
        "precision": precision,
        "perturb": PerturbConfig(routing=config.perturb.routing),
        "max_staleness": 0,
        "staleness_schedule": "periodic",
        "pool": PoolConfig(),
        "parallel": ParallelConfig(),
        "monitor": MonitorConfig(),
    }
    try:
        changed = Config.model_validate(config.model_copy(update=changes).model_dump())
    except ValidationError as error:
        raise ValueError(validation_message(error)) from None
    check_settings(changed)
    return changed


def run_gradient_bias(
    target: Target, config: Config, draws: int, seed: int, stage: Callable[[str], None] = silent
) -> DrawnBias:
    """Measure the bias at a checkpoint. config: see pair_config. draws: of each kind, at least 3.

    seed: of the draws; the problems are in the run's own order. It holds 2 `draws` gradients in the host's
    memory. stage: is called with what begins now, in words. Raises ValueError for bad input.
    """
    check_draws(draws)
    with _state(target, config) as state:
        places = range(draws)
        stage(f"drawing {draws} times with {config.sampler}")
        keys = [RngKey(seed, i, Stream.GRADIENT_SAMPLED) for i in places]
        sampled = [drawn(state, state.sampler, key, state.version) for key in keys]
        stage(f"{draws} exact gradients")
        exact = [exact_gradient(state, RngKey(seed, i, Stream.GRADIENT_EXACT)) for i in places]
        losses: dict[str, dict[str, Bias]] = {}
        whole_products = None
        for name, products in loss_products(state, measured_losses(state), sampled, exact):
            stage(f"{draws} gradients of the loss {name}")
            losses[name] = {layer: estimate(x) for layer, x in products.items()}
            whole_products = products[WHOLE]
        layers = [layer for layer in losses["own"] if layer != WHOLE]
        return DrawnBias(
            step=state.step,
            sampler=config.sampler,
            draws=draws,
            prompts=config.prompts,
            num_generations=config.rollouts_per_prompt,
            exact=of_exact(whole_products[draws:, draws:]),
            losses={name: by_layer[WHOLE] for name, by_layer in losses.items()},
            layers={layer: {name: x[layer] for name, x in losses.items()} for layer in layers},
        )


@contextmanager
def _state(target: Target, config: Config) -> Iterator[TrainState]:
    """A state with the weights of the checkpoint. Its processes end with the context."""
    config = settled(config)
    task = load_task(config.task.name, config.task.options, config.task.directory)
    with run_judge(config, task) as judge, run_equivalence(config) as equivalence:
        state = make_state(config, base_model(config, target.run), task, judge, equivalence=equivalence)
        try:
            if target.checkpoint is not None:
                restore(state, target.checkpoint)
            yield state
        finally:
            state.close()
