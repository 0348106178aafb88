"""All faults, found by their place: a file of numbers/, model/, ids/, draws/, signal/ or columns/ is one.

A file of operations/ has the faults of one kind of operation, which are looked for where engines are traced.
Files of numbers/, ids/, signal/ and columns/ load without torch. How many need a model is known without
loading those.
"""

from functools import cache
from importlib import import_module
from importlib.resources import files
from types import ModuleType
from typing import TYPE_CHECKING

from .fault import Checked, Fault, Predicted, Shown

if TYPE_CHECKING:
    from ...model.operation import Equation
    from .changed_operation import ChangedOperation


def _names(place: str) -> list[str]:
    """The names of the files of a place, sorted."""
    names = (x.name.partition(".py") for x in files(f"{__package__}.{place}").iterdir())
    return sorted(name for name, dot, rest in names if dot and not rest and name != "__init__")


def _modules(place: str) -> list[ModuleType]:
    return [import_module(f".{place}.{name}", __package__) for name in _names(place)]


@cache
def faults_of(*places: str) -> tuple[Fault, ...]:
    """The faults of some places, in their order."""
    faults = (module.FAULT for place in places for module in _modules(place))
    return tuple(sorted(faults, key=lambda fault: fault.order))


def without_model() -> tuple[Predicted, ...]:
    """The faults that two columns are tried on."""
    return faults_of("numbers")


def with_model(has_decoder: bool = True) -> tuple[Predicted, ...]:
    """The faults that a log is tried on beside a model. has_decoder: whether zerokl has one of its family."""
    return tuple(x for x in faults_of("numbers", "model") if has_decoder or not x.needs_decoder)


def in_ids() -> tuple[Shown, ...]:
    """The faults that ids show."""
    return faults_of("ids")


def in_draws() -> tuple[Shown, ...]:
    """The faults that drawn tokens show beside a model."""
    return faults_of("draws")


def checked() -> tuple[Checked, ...]:
    """The faults that checks of a whole log tell."""
    return (*faults_of("signal"), *faults_of("columns"))


def predicted_count() -> int:
    """How many faults are predicted, with a model and without."""
    return len(_names("numbers")) + len(_names("model"))


def everything() -> tuple[Fault, ...]:
    """All faults."""
    return (*with_model(), *in_ids(), *in_draws(), *checked())


@cache
def changed_operations() -> "dict[Equation, ChangedOperation]":
    """What is tried of a traced operation, by its equation."""
    return {x: module.CHANGED for module in _modules("operations") for x in module.CHANGED.equations}
