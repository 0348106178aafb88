"""What libraries of games have in common: a game is begun from a seed, and draws from global generators.

Problem number i begins with a seed of its own. So all trajectories of a group begin alike, and a held-out
problem is the same game at every evaluation. What is drawn after the beginning comes from the trajectory's
key, where the library draws it from a global generator of Python or NumPy.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np

from ...engine.tasks.environment import EnvironmentKey
from ...engine.tasks.problem import Problem

_LARGEST_SEED = (1 << 31) - 1


class OwnGenerators:
    """Python's and NumPy's global generators, as one environment sees them.

    A process plays many environments by turns. With this, what one draws does not depend on its neighbours.
    """

    def __init__(self):
        self._seed(0)  # for what is drawn before the first seed

    def seed(self, key: EnvironmentKey) -> None:
        """Let what is drawn from here on follow from the key of the trajectory."""
        self._seed(key.random("generators").getrandbits(32))

    def _seed(self, seed: int) -> None:
        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = np.random.RandomState(seed).get_state()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside this context the global generators are those of the environment."""
        before = random.getstate(), np.random.get_state()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        try:
            yield
        finally:
            self._python, self._numpy = random.getstate(), np.random.get_state()
            random.setstate(before[0])
            np.random.set_state(before[1])


def seeded_problems(what: str, game: str, train: int, held_out: int, seed: int) -> dict[str, list[Problem]]:
    """Problems whose answer is the seed of a game: `train` from `seed` on, then `held_out` others.

    what: the task, as an error names it. Raises ValueError for numbers that give no seeds.
    """
    if train < 1 or held_out < 0 or seed < 0 or seed + train + held_out > _LARGEST_SEED:
        raise ValueError(
            f"task {what}: train ({train}) must be at least 1, held_out ({held_out}) and seed ({seed}) at "
            f"least 0, and their sum at most {_LARGEST_SEED}"
        )
    parts = {"train": range(seed, seed + train), "held_out": range(seed + train, seed + train + held_out)}
    return {
        split: [Problem(i, f"{game}, seed {n}", str(n)) for i, n in enumerate(seeds)]
        for split, seeds in parts.items()
    }


def check_installed(what: str, module: str, install: str) -> None:
    """Raise ValueError where the library `module` is missing. It is loaded where it plays, not here."""
    if find_spec(module) is None:
        raise ValueError(f"task {what}: {module} is not installed; {install}")
