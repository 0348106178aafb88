"""The application whose commands the other files of this folder are, and the types of their options."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from cyclopts import App, Parameter

from ..engine.display.output import PipedConsole
from .command_line import version_line

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


def command(example: str, name: str | None = None, of: App = app) -> Callable[[F], F]:
    """Make a function a subcommand whose help opens with an example. name: by default the function's."""
    return of.command(name=name, help_prologue=f"Example: {example}")
