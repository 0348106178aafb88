"""Pairs of completions from a file of JSON objects, a line each: one is chosen, the other rejected.

Nobody draws these completions. The loss preset dpo trains on them (engine/train/losses/dpo.py).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from .base import Problem, SplitTask
from .json_lines import PLACE, Record, prompt_template, read_records, read_splits, text_of
from .limits import LONGEST_PROMPT


@dataclass(frozen=True)
class Pair(Problem):
    """A problem whose answer is the chosen completion."""

    rejected: str = ""


class Pairs(SplitTask):
    """The pairs of `file`.

    prompt, chosen, rejected: names of columns. template: the prompt that the model sees, with {prompt} for
    that of the file. system: the system prompt. chat: whether prompts go through the tokenizer's chat
    template. A completion is the text as it is, and a stop token after it.

    The held-out split is `held_out_file`, or `held_out` lines of `file`, chosen by `seed`: a number of lines,
    or a share between 0 and 1.

    Raises ValueError for a missing or empty file, for a malformed line, whose number it names, and for a pair
    of equal completions.
    """

    def __init__(
        self,
        file: str = "",
        prompt: str = "prompt",
        chosen: str = "chosen",
        rejected: str = "rejected",
        template: str = "",
        system: str = "",
        chat: bool = True,
        held_out_file: str = "",
        held_out: int | float = 0,
        seed: int = 0,
    ):
        self.chat, self._system = chat, system
        self._template = prompt_template("pairs", template, system, chat)
        read = partial(_triples, columns={"prompt": prompt, "chosen": chosen, "rejected": rejected})
        splits = read_splits("pairs", read, file, held_out_file, held_out, seed)
        self._splits = {
            split: [*map(self._pair, range(len(triples)), triples)] for split, triples in splits.items()
        }

    def reward(self, problem: Problem, completion: str) -> float:
        """1.0 for the chosen completion, else 0.0. A run asks for no reward: it scores both completions."""
        return float(completion == problem.answer)

    def _pair(self, i: int, triple: tuple[str, str, str]) -> Pair:
        prompt, chosen, rejected = triple
        return Pair(i, self._template.replace(PLACE, prompt), chosen, self._system, rejected)


def _triples(file: str, columns: dict[str, str]) -> list[tuple[str, str, str]]:
    return [_triple(record, [*columns.values()]) for record in read_records("pairs", file, columns, "pairs")]


def _triple(record: Record, columns: list[str]) -> tuple[str, str, str]:
    """(prompt, chosen, rejected) of a line. Raises ValueError."""
    texts = [_text(value, record.where, column) for value, column in zip(record.values, columns, strict=True)]
    if texts[1] == texts[2]:
        raise ValueError(
            f'{record.where}: "{columns[1]}" and "{columns[2]}" are equal, so nothing is preferred'
        )
    return texts[0], texts[1], texts[2]


def _text(value: Any, where: str, column: str) -> str:
    text = text_of(value, where, column)
    if len(text) > LONGEST_PROMPT:
        raise ValueError(f'{where}: "{column}" has {len(text):,} characters, at most {LONGEST_PROMPT:,}')
    return text
