"""The application whose commands the other files of this folder are, and the types of their options."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from cyclopts import App, Group, Parameter

from ..engine.display.output import PipedConsole
from .command_line import RUN_COMMANDS, version_line

Dtype = Literal["float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
CountOrAll = Annotated[int | None, Parameter(alias="-n")]
Count = Annotated[int, Parameter(alias="-n")]
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


app["--help"].group = app["--version"].group = Group("Help", sort_key=2)
_GROUPS = {
    Group("Train and reproduce", sort_key=0): RUN_COMMANDS.split(),
    Group("Audit any sampler and trainer", sort_key=1): ["audit", "record", "convert", "capsule"],
}


def listed(name: str) -> dict[str, Any]:
    """Where help lists a command: its group, and its place there."""
    group, names = next((group, names) for group, names in _GROUPS.items() if name in names)
    return {"group": group, "sort_key": names.index(name)}


def command(example: str, name: str | None = None, parent: App = app) -> Callable[[F], F]:
    """Make a function a subcommand whose help opens with an example. name: by default the function's."""

    def registered(function: F) -> F:
        place = listed(name or function.__name__) if parent is app else {}
        return parent.command(function, name=name, help_prologue=f"Example: {example}", **place)

    return registered
