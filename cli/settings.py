"""The settings of a run as options of a command, and the options of a task."""

from collections.abc import Collection
from typing import Annotated, Any, Literal

from cyclopts import App, Group, Parameter
from pydantic import create_model

from ..engine.config.config_file import known_keys, preset_names
from ..engine.config.init_section import InitSettings
from ..engine.config.loss_section import LossChoices
from ..engine.config.run_config import Config
from ..engine.config.section import Section

# What most runs set. `zerokl train --help` shows these, and `--help all` or `--help SECTION` the rest.
_COMMON = (
    *(
        "model",
        "dtype",
        "device",
        "seed",
        "steps",
        "prompts",
        "num_generations",
        "updates_per_rollout",
        "exact",
    ),
    *("sampler", "micro_batch", "workers", "tracking"),
    *("task.name", "task.options", "task.reward"),
    *("sampling.temperature", "sampling.top_p", "sampling.top_k", "sampling.max_tokens"),
    *(
        "environment.max_turns",
        "loss.preset",
        "loss.advantage",
        "loss.kl_coef",
        "loss.clip_high",
        "lora.rank",
    ),
    *("optimizer.lr", "optimizer.schedule", "optimizer.warmup_steps", "optimizer.max_grad_norm"),
    *("evaluation.every", "evaluation.problems", "checkpoint.every", "checkpoint.keep", "precision.weights"),
)


def _given(name: str) -> tuple[type[Section], Section]:
    """A section as it is given, and its default: the choices of a loss may be left open."""
    if name == "loss":
        return LossChoices, LossChoices()
    field = Config.model_fields[name]
    return field.annotation, field.default


def _grouped(shown: Collection[str]) -> type[Config]:
    """The configuration, each section of which is a group of the help under the section's docstring.

    shown: the keys that help shows.
    """
    fields: dict[str, Any] = {}
    for place, (name, field) in enumerate(Config.model_fields.items()):
        if name in sections():
            section, default = _given(name)
            group = Group(name, help=" ".join((section.__doc__ or "").split()), sort_key=place)
            fields[name] = Annotated[_hiding(section, f"{name}.", shown), Parameter(group=group)], default
        elif name not in shown:
            fields[name] = Annotated[field.annotation, Parameter(show=False)], field
    return create_model("Config", __base__=Config, **fields)


def _hiding(section: type[Section], prefix: str, shown: Collection[str]) -> type[Section]:
    """A section of whose keys help shows only some. prefix: of its keys."""
    hidden = {name: field for name, field in section.model_fields.items() if prefix + name not in shown}
    fields: dict[str, Any] = {
        name: (Annotated[field.annotation, Parameter(show=False)], field) for name, field in hidden.items()
    }
    return create_model(section.__name__, __base__=section, __doc__=section.__doc__, **fields)


def sections() -> list[str]:
    """The names of the configuration's sections."""
    return [name for name, field in Config.model_fields.items() if isinstance(field.default, Section)]


def help_of(app: App, name: str) -> App:
    """An application whose help is that of all settings of `zerokl train`, or of one section of them.

    app: the application that it looks like. name: "all" or a section. Raises ValueError for another name.
    """
    if name not in ("all", *sections()):
        raise ValueError(f"train: --help {name[:100]} is no section; give all, or {', '.join(sections())}")
    kind = Annotated[_grouped(list(known_keys())), Parameter(name="*")]
    settings, default = (kind, NO_SETTINGS) if name == "all" else _given(name)
    asked = App(
        name="zerokl train",
        help="All settings." if name == "all" else settings.__doc__,
        console=app.console,
        version_flags=(),
        result_action="return_value",
    )
    asked.default_parameter = app.default_parameter
    named = settings if name == "all" else Annotated[settings, Parameter(name=name)]

    @asked.default
    def train(*, settings: named = default) -> None:  # type: ignore[valid-type]
        """Take settings, for their help alone."""

    return asked


Settings = Annotated[_grouped(_COMMON), Parameter(name="*")]

TaskOptions = Annotated[dict[str, str] | None, Parameter(name="task.options")]
TaskReward = Annotated[str, Parameter(name="task.reward")]
Preset = Literal[tuple(preset_names())]  # type: ignore[valid-type]
NO_SETTINGS = Config()
OfInit = Annotated[InitSettings, Parameter(name="*")]
NO_INIT_SETTINGS = InitSettings()
