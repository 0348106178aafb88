"""The settings of a run as options of a command, and the options of a task."""

from collections.abc import Collection
from typing import Annotated, Any, Literal

from cyclopts import App, Group, Parameter
from pydantic import create_model

from ..engine.config.config_file import known_keys, preset_names
from ..engine.config.init_section import InitSettings
from ..engine.config.loss_section import LossChoices
from ..engine.config.run_config import Config
from ..engine.config.section import Section, section_of, settings_of


def _given(name: str) -> tuple[type[Section], Section]:
    """A section as it is given, and its default: the choices of a loss may be left open."""
    if name == "loss":
        return LossChoices, LossChoices()
    field = Config.model_fields[name]
    return field.annotation, field.default


def _showing(model: type[Section], shown: Collection[str], prefix: str = "") -> type[Section]:
    """A configuration or a section of whose keys help shows only some. prefix: of its keys.

    Each section in it is a group of the help under the section's docstring.
    """
    fields: dict[str, Any] = {}
    for place, (name, field) in enumerate(model.model_fields.items()):
        if section_of(field):
            section, default = _given(name)
            group = Group(name, help=" ".join((section.__doc__ or "").split()), sort_key=place)
            fields[name] = Annotated[_showing(section, shown, f"{name}."), Parameter(group=group)], default
        elif prefix + name not in shown:
            fields[name] = Annotated[field.annotation, Parameter(show=False)], field
    return create_model(model.__name__, __base__=model, __doc__=model.__doc__, **fields)


def sections() -> list[str]:
    """The names of the configuration's sections."""
    return [name for name, field in Config.model_fields.items() if section_of(field)]


def help_of(app: App, name: str) -> App:
    """An application whose help is that of all settings of `zerokl train`, or of one section of them.

    app: the application that it looks like. name: "all" or a section. Raises ValueError for another name.
    """
    if name not in ("all", *sections()):
        raise ValueError(f"train: --help {name[:100]} is no section; give all, or {', '.join(sections())}")
    kind = Annotated[_showing(Config, known_keys()), Parameter(name="*")]
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


# `zerokl train --help` shows what most runs set, and `--help all` or `--help SECTION` the rest.
_COMMON = [key for key, setting in settings_of(Config).items() if setting.facts.common]
Settings = Annotated[_showing(Config, _COMMON), Parameter(name="*")]

TaskOptions = Annotated[dict[str, str] | None, Parameter(name="task.options")]
TaskReward = Annotated[str, Parameter(name="task.reward")]
Preset = Literal[tuple(preset_names())]  # type: ignore[valid-type]
NO_SETTINGS = Config()
OfInit = Annotated[InitSettings, Parameter(name="*")]
NO_INIT_SETTINGS = InitSettings()
