"""Lines of a log whose two columns differ by rounding."""

from collections.abc import Callable

import numpy as np
from zerokl.audit.formats.record import LoggedRollout

END = 1
Prompt = Callable[[np.random.Generator, int], tuple[int, ...]]


def rounded_lines(seed: int, size: float, lines: int, prompt: Prompt) -> list[LoggedRollout]:
    """Differences of `size` in nats: heavy-tailed, smaller for likely tokens, as logits move.

    prompt(rng, i): the ids of line i's prompt.
    """
    rng, rollouts = np.random.default_rng(seed), []
    for i in range(lines):
        n = int(rng.integers(12, 90))
        s = -rng.gamma(1.2, 2.0, n)
        d = size * rng.standard_t(7, n) * (1.02 - np.exp(s))
        ids = (*rng.integers(3, 400, n - 1).tolist(), END)
        columns = np.float32(s), np.float32(np.minimum(s + d, 0.0))
        rollouts.append(LoggedRollout(prompt(rng, i), ids, *columns))
    return rollouts
