"""The model that a run starts from: a folder, a hub name, or a model made for the task (`init:PRESET`)."""

from pathlib import Path

from ...model.checkpoint import resolve_model
from ..config.init_section import InitSettings
from ..config.run_config import Config
from ..tasks.perfectible import perfectible_set
from .init import initialise

_DEFAULT = InitSettings().model_dump(mode="json")


def base_model(config: Config, path: Path) -> Path:
    """The folder of the model from which the run in the folder `path` starts. Raises ValueError.

    For `init:PRESET` the model is made in `path`/base.
    """
    if not config.model.startswith("init:"):
        return resolve_model(config.model)
    base = path / "base"
    # A run that stopped before its first step has left this model behind. It is not made a second time.
    if not is_base(base, config):
        make_base(base, config)
    return base


def make_base(base: Path, config: Config) -> None:
    """Make the model for config.model (init:PRESET) in the folder `base`. Raises ValueError."""
    preset, init = config.model.removeprefix("init:"), config.init
    seed = init.seed_of(config.seed)
    initialise(base, config.task.name, config.task.options, preset, seed, init.settings)


def is_base(base: Path, config: Config) -> bool:
    """Whether the folder `base` already holds the model that `make_base` would make there."""
    preset = config.model.removeprefix("init:")
    task, seed = config.task, config.init.seed_of(config.seed)
    wanted = {"task": task.name, "options": task.options, "preset": preset, "seed": seed}
    perfectible = perfectible_set(base)
    if perfectible is None or any(perfectible[key] != value for key, value in wanted.items()):
        return False
    # A base model of an older zerokl says nothing about these settings: it was made with the defaults.
    return perfectible.get("init", _DEFAULT) == config.init.settings.model_dump(mode="json")
