"""The application whose commands the other files of this folder are, and the types of their options."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from cyclopts import App, Group, Parameter
from pydantic import create_model

from ..engine.config import Config
from ..engine.config_file import preset_names
from ..engine.display.output import PipedConsole
from ..engine.section import Section
from .command_line import version_line


def _grouped(config: type[Config]) -> type[Config]:
    """The configuration, each section of which is a group of the help under the section's docstring."""
    fields: dict[str, Any] = {}
    for name, field in config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            group = Group(name, help=field.annotation.__doc__ or "")
            fields[name] = (Annotated[field.annotation, Parameter(group=group)], field.default)
    return create_model("Config", __base__=config, **fields)


Settings = Annotated[_grouped(Config), Parameter(name="*")]

Dtype = Literal["float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
TaskOptions = Annotated[dict[str, str] | None, Parameter(name="task.options")]
TaskReward = Annotated[str, Parameter(name="task.reward")]
Preset = Literal[tuple(preset_names())]  # type: ignore[valid-type]
CountOrAll = Annotated[int | None, Parameter(alias="-n")]
Count = Annotated[int, Parameter(alias="-n")]
NO_SETTINGS = Config()
F = TypeVar("F", bound=Callable[..., Any])
app = App(
    name="zerokl",
    help="Exact reinforcement learning of language models: "
    "the trainer's log-probabilities are bit for bit the sampler's.",
    version=version_line,
    console=PipedConsole(),
    default_parameter=Parameter(name_transform=lambda name: name, negative_iterable=()),
    result_action="return_value",
    suppress_keyboard_interrupt=False,  # main says what happened
)


def command(example: str, name: str | None = None, of: App = app) -> Callable[[F], F]:
    """Make a function a subcommand whose help opens with an example. name: by default the function's."""
    return of.command(name=name, help_prologue=f"Example: {example}")


attest_app = App(
    name="attest", help_prologue="Example: zerokl attest runs/demo --key ~/.ssh/id_ed25519 --out B"
)
app.command(attest_app)
verify_app = App(name="verify", help_prologue="Example: zerokl verify runs/demo/base")
app.command(verify_app)
