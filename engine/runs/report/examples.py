"""What the model wrote for the same prompts early and late in a run."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Prompts that are shown, and characters of a text that are kept: the page shows fewer.
EXAMPLES, _CHARACTERS = 6, 400


@dataclass
class _Group:
    """The completions of a prompt in a step: the first one, and the rewards of all."""

    step: int
    prompt: int  # its place in the step
    prompt_text: str
    text: str
    finish: str
    reward: float
    rewards: float = 0.0  # sum over the `n` completions
    n: int = 0

    @property
    def mean(self) -> float:
        """The mean reward of the group."""
        return self.rewards / self.n

    def shown(self) -> dict[str, Any]:
        """What the page shows of it. mean: of the rewards of the whole group."""
        names = ("step", "text", "finish", "reward", "n")
        return {name: getattr(self, name) for name in names} | {"mean": self.mean}


def _rose_first(pair: tuple[_Group, _Group]) -> tuple[bool, int, int, int]:
    early, late = pair
    return late.mean <= early.mean, early.step - late.step, early.step, early.prompt


class PromptHistory:
    """The first and the newest group of each prompt, from the rows of rollouts.jsonl in their order."""

    def __init__(self) -> None:
        self._first: dict[bytes, _Group] = {}
        self._newest: dict[bytes, _Group] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        """Take in one completion."""
        # Long prompts are kept as hashes.
        key = hashlib.sha256(f"{row['problem']} {row['prompt_text']}".encode("utf-8", "replace")).digest()
        group, place = self._newest.get(key), (row["step"], row["prompt"])
        if group is None or (group.step, group.prompt) != place:
            texts = (row["prompt_text"][:_CHARACTERS], row["text"][:_CHARACTERS])
            group = self._newest[key] = _Group(*place, *texts, row["finish"], row["reward"])
            self._first.setdefault(key, group)
        group.rewards += row["reward"]
        group.n += 1

    def examples(self) -> dict[str, Any]:
        """Prompts that occur in two steps, where there are any: those whose mean reward rose come first.

        Of these, and of the others, those nearest to the run's two ends.
        again: how many occur in two steps. rose, fell: in how many of them the mean of the newest group is
        above, or below, that of the first one.
        same_prompts: whether each prompt of `prompts` has two entries in `written`, an early and a late one.
        Where no prompt occurs in two steps, they are the first prompts of the first and of the last step.
        """
        pairs = [(early, self._newest[key]) for key, early in self._first.items()]
        again = [(early, late) for early, late in pairs if early.step < late.step]
        gains = [late.mean - early.mean for early, late in again]
        # The order of early.step - late.step is that of the distance from both ends.
        again.sort(key=_rose_first)
        chosen: list[tuple[_Group, ...]] = [*again[:EXAMPLES]]
        if not again and pairs:
            first = min(early.step for early, _ in pairs)
            last = max(late.step for _, late in pairs)
            groups = sorted((early for early, _ in pairs), key=lambda g: (g.step, g.prompt))
            for step in sorted({first, last}):
                chosen += [(group,) for group in groups if group.step == step][:EXAMPLES]
        return {
            "same_prompts": bool(again),
            "rose": sum(gain > 0 for gain in gains),
            "fell": sum(gain < 0 for gain in gains),
            "again": len(again),
            "prompts": [
                {"prompt_text": groups[0].prompt_text, "written": [group.shown() for group in groups]}
                for groups in chosen
            ],
        }
