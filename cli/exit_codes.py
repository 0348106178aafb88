"""The exit codes of every subcommand, each for one thing."""

from collections.abc import Collection
from enum import IntEnum

from ..engine.display.output import OUTPUT_CLOSED
from ..verify.difference import Mark


class ExitCode(IntEnum):
    """What the end of a command says. docs/commands.md has the same table, and a test compares the two."""

    DONE = 0
    """It was done; what was compared is equal, or within the tolerance."""
    DIFFERS = 1
    """Something that was compared differs: a bit, a run, an audit beyond its tolerance or with a fault."""
    REFUSED = 2
    """It could not be done, for a reason that the line on stderr gives: input, a file, the machine."""
    UNCONFIRMED = 3
    """Nothing was found wrong, and not all was confirmed: steps of another kind of machine."""
    INTERNAL = 70
    """An error that nobody foresaw: a fault of zerokl's."""
    INTERRUPTED = 130
    """Ctrl-C ended it."""
    OUTPUT_CLOSED = OUTPUT_CLOSED
    """Whoever read its output ended first, as in `| head -1`."""

    @classmethod
    def of(cls, equal: bool) -> "ExitCode":
        """The end of a comparison: whether both are equal, or within the tolerance."""
        return cls.DONE if equal else cls.DIFFERS

    @classmethod
    def after(cls, marks: Collection[Mark]) -> "ExitCode":
        """The end of a check of many lines: one that differs decides, and else one that is open."""
        if Mark.DIFFERENT in marks:
            return cls.DIFFERS
        return cls.UNCONFIRMED if Mark.OPEN in marks else cls.DONE
