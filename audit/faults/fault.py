"""What a fault's file says of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..hypotheses.prediction import Predictor

if TYPE_CHECKING:
    from .planting.world import Log, World


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A way to plant a fault, by another route than the one that predicts it."""

    group: str  # the class in the table of docs/audit/found.md
    make: "Callable[[World], Log]"
    # Kinds of the cause, or words in its text, any of which is right. Empty: the fault's name.
    named: tuple[str, ...] = ()
    # Why an audit may see that something is wrong and tell no cause; empty where it must tell it.
    untold: str = ""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of fault. Its file holds it as FAULT."""

    name: str
    # Of several that fit equally well, the one with the least number is named: the simple ones stand first.
    order: int
    remedy: str
    tries: str  # what is tried, or looked at, for docs/audit/log.md
    known_from: tuple[str, ...] = ()  # public reports of it
    perturb: tuple[str, ...] = ()  # the settings of `[perturb]` that plant it in a run's sampler
    plants: tuple[Plant, ...] = ()

    def names_of(self, plant: Plant) -> tuple[str, ...]:
        """What a report may call a plant, any of which is right."""
        return plant.named or (self.name,)


@dataclass(frozen=True, kw_only=True)
class Predicted(Fault):
    """A fault whose numbers are predicted and compared with a log's, of either side."""

    predict: Predictor
    # It changes weights or operations of zerokl's decoder, and is not tried on a family that has none.
    needs_decoder: bool = False
    # It is rounding itself: no fault where the difference is no larger than rounding.
    is_rounding: bool = False
    # Another engine decides its roundings otherwise now and then, so the slope on the prediction is below 1.
    is_dimmed: bool = False
    is_second: bool = False  # whether it is tried once more on what a first cause leaves
    is_of_whole_log: bool = False  # whether it looks among all lines, or needs no model
    is_at_once: bool = False  # whether it searches nothing and changes no weight: one forward at most
    # Its difference is far above rounding and it takes many forwards: it is tried where no other one fits,
    # and not at all where the whole difference is like rounding.
    is_late: bool = False


@dataclass(frozen=True, kw_only=True)
class Shown(Fault):
    """A fault that a log shows whatever its numbers are.

    look: of the lines and the tokenizer (ids/), or of the logits (draws/) -> what is wrong, in words; None
    where nothing is.
    """

    look: Callable[..., str | None]
    needs_tokenizer: bool = False

    def shown(self, *evidence: Any) -> "LogFault | None":
        """The fault of a log; None where it does not show it."""
        text = self.look(*evidence)
        return LogFault(self.name, text, self.remedy) if text else None


@dataclass(frozen=True)
class LogFault:
    """A fault of a log: its name, what it is, and what to do about it."""

    name: str
    text: str
    remedy: str
