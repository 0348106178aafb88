"""All faults, found by their place: a file of numbers/, model/, ids/ or draws/ is a fault.

Files of numbers/ and ids/ load without torch. How many need a model is known without loading those.
"""

from functools import cache
from importlib import import_module
from importlib.resources import files

from .fault import Fault, Predicted, Shown


def _names(place: str) -> list[str]:
    """The names of the files of a place, sorted."""
    names = (x.name.removesuffix(".py") for x in files(f"{__package__}.{place}").iterdir())
    return sorted(name for name in names if not name.startswith("__"))


@cache
def faults_of(*places: str) -> tuple[Fault, ...]:
    """The faults of some places, in their order."""
    modules = [import_module(f".{place}.{name}", __package__) for place in places for name in _names(place)]
    return tuple(sorted((module.FAULT for module in modules), key=lambda fault: fault.order))


def without_model() -> tuple[Predicted, ...]:
    """The faults that two columns are tried on."""
    return faults_of("numbers")


def with_model() -> tuple[Predicted, ...]:
    """The faults that a log is tried on beside a model."""
    return faults_of("numbers", "model")


def in_ids() -> tuple[Shown, ...]:
    """The faults that ids show."""
    return faults_of("ids")


def in_draws() -> tuple[Shown, ...]:
    """The faults that drawn tokens show beside a model."""
    return faults_of("draws")


def predicted_count() -> int:
    """How many faults are predicted, with a model and without."""
    return len(_names("numbers")) + len(_names("model"))


def everything() -> tuple[Fault, ...]:
    """All faults."""
    return (*with_model(), *in_ids(), *in_draws())
