"""The settings of a run as options of a command, and the options of a task."""

from typing import Annotated, Any, Literal

from cyclopts import App, Group, Parameter
from pydantic import create_model

from ..engine.config import Config
from ..engine.config_file import preset_names
from ..engine.init_config import InitSettings
from ..engine.loss.config import LossChoices
from ..engine.section import Section


def _given(name: str) -> tuple[type[Section], Section]:
    """A section as it is given, and its default: the choices of a loss may be left open."""
    if name == "loss":
        return LossChoices, LossChoices()
    field = Config.model_fields[name]
    return field.annotation, field.default


def _grouped(config: type[Config]) -> type[Config]:
    """The configuration, each section of which is a group of the help under the section's docstring."""
    fields: dict[str, Any] = {}
    for name, field in config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            group = Group(name, help=field.annotation.__doc__ or "")
            given, default = _given(name)
            fields[name] = (Annotated[given, Parameter(group=group)], default)
    return create_model("Config", __base__=config, **fields)


def sections() -> list[str]:
    """The names of the configuration's sections."""
    return [name for name, field in Config.model_fields.items() if isinstance(field.default, Section)]


def section_help(app: App, name: str) -> App:
    """An application whose help is that of one section of the settings of `zerokl train`.

    app: the application that it looks like. Raises ValueError for a section that there is not.
    """
    if name not in sections():
        raise ValueError(f"train: --help {name[:100]} is no section; sections are {', '.join(sections())}")
    section, defaults = _given(name)
    of_section = App(
        name="zerokl train",
        help=section.__doc__,
        console=app.console,
        version_flags=(),
        result_action="return_value",
    )
    of_section.default_parameter = app.default_parameter

    @of_section.default
    def train(*, settings: Annotated[section, Parameter(name=name)] = defaults) -> None:  # type: ignore[valid-type]
        """Take the settings of a section, for its help alone."""

    return of_section


Settings = Annotated[_grouped(Config), Parameter(name="*")]

TaskOptions = Annotated[dict[str, str] | None, Parameter(name="task.options")]
TaskReward = Annotated[str, Parameter(name="task.reward")]
Preset = Literal[tuple(preset_names())]  # type: ignore[valid-type]
NO_SETTINGS = Config()
OfInit = Annotated[InitSettings, Parameter(name="*")]
NO_INIT_SETTINGS = InitSettings()
