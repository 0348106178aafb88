"""Classes of texts that mean the same, as a process of the executor forms them.

Nothing here loads torch or numpy (see processes/process.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

from .users_code import add_places, awaited, load_object


class EquivalenceFunction:
    """Of the texts of a group: the number of each text's class.

    The distinct texts are compared in the order of their characters. Each joins the first class whose first
    text is equivalent to it, or begins a new class. So the classes follow from the texts alone, whatever
    their order in the group, and equal texts are never compared.
    """

    def __init__(self, equivalent: Callable[[str, str], Any]):
        self._equivalent = equivalent

    def __call__(self, texts: Sequence[str]) -> list[int]:
        """Raises whatever the user's function raises, and TypeError for a value that is not a bool."""
        firsts: list[str] = []
        classes: dict[str, int] = {}
        for text in sorted(set(texts)):
            places = (i for i, first in enumerate(firsts) if self._holds(first, text))
            classes[text] = next(places, len(firsts))
            if classes[text] == len(firsts):
                firsts.append(text)
        return [classes[text] for text in texts]

    def _holds(self, a: str, b: str) -> bool:
        value = awaited(self._equivalent(a, b))
        # NumPy calls its own bool `bool`, and before version 2 `bool_`.
        if type(value).__name__ not in ("bool", "bool_"):
            raise TypeError(f"its value is of the type {type(value).__name__}; it must be True or False")
        return bool(value)


def equivalence_function(name: str, directory: str) -> EquivalenceFunction:
    """The classes by the user's function `name`, as module:function, found as load_object says.

    Raises ValueError.
    """
    add_places(directory)  # for good: this process exists for this function alone
    equivalent = load_object(name, "equivalence", directory)
    if not callable(equivalent):
        raise ValueError(f"equivalence: {name} is a {type(equivalent).__name__}; it must be a function")
    return EquivalenceFunction(equivalent)
