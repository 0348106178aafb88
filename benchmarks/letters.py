"""A task without right answers, for benchmarks: its reward differs between the samples of a group.

So every group has a gradient, with a model of random weights too.
"""

from collections.abc import Sequence

from zerokl.engine.tasks.base import Problem

# The first printable character; and the code points that are no characters.
_FIRST, _SURROGATES = 0x21, range(0xD800, 0xE000)


def characters(n: int) -> str:
    """n different characters; the ASCII ones come first."""
    return "".join(chr(c) for c in range(_FIRST, _FIRST + n + len(_SURROGATES)) if c not in _SURROGATES)[:n]


class Letters:
    """Prompts of random-looking letters. The reward is the share of characters with an even code point."""

    chat = False

    def __init__(self, prompts: int = 8, length: int = 16):
        self._prompts, self._length = prompts, length

    def problems(self, split: str) -> Sequence[Problem]:
        def text(i: int) -> str:
            return "".join(chr(97 + (7 * i + 3 * j + i * j) % 26) for j in range(self._length))

        return [Problem(i, text(i), "") for i in range(self._prompts)]

    def reward(self, problem: Problem, completion: str) -> float:
        return sum(ord(c) % 2 == 0 for c in completion) / max(1, len(completion))
