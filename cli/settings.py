"""The settings of a run as options of a command, and the options of a task."""

from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter
from pydantic import create_model

from ..engine.config import Config
from ..engine.config_file import preset_names
from ..engine.init_config import InitSettings
from ..engine.section import Section


def _grouped(config: type[Config]) -> type[Config]:
    """The configuration, each section of which is a group of the help under the section's docstring."""
    fields: dict[str, Any] = {}
    for name, field in config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            group = Group(name, help=field.annotation.__doc__ or "")
            fields[name] = (Annotated[field.annotation, Parameter(group=group)], field.default)
    return create_model("Config", __base__=config, **fields)


Settings = Annotated[_grouped(Config), Parameter(name="*")]

TaskOptions = Annotated[dict[str, str] | None, Parameter(name="task.options")]
TaskReward = Annotated[str, Parameter(name="task.reward")]
Preset = Literal[tuple(preset_names())]  # type: ignore[valid-type]
NO_SETTINGS = Config()
OfInit = Annotated[InitSettings, Parameter(name="*")]
NO_INIT_SETTINGS = InitSettings()
