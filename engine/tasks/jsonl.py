"""Problems from a file of JSON objects, a line each: one column is the prompt, another one the answer."""

from functools import partial
from typing import Any

from ...files.reading import shown
from .answers import NAMED_REWARDS, READ_CHARS
from .base import Problem, SplitTask
from .json_lines import PLACE, kind_of, prompt_template, read_records, read_splits, text_of


class Jsonl(SplitTask):
    """The problems of `file`. The reward is math-verify's; task.reward names another.

    prompt, answer: names of columns. answer_after: only what follows the last occurrence of this text is the
    answer; GSM8K has "####". template: the prompt that the model sees, with {prompt} for that of the file.
    system: the system prompt. chat: whether prompts go through the tokenizer's chat template.

    The held-out split is `held_out_file`, or `held_out` lines of `file`, chosen by `seed`: a number of lines,
    or a share between 0 and 1.

    Raises ValueError for a missing or empty file, and for a malformed line, whose number it names.
    """

    def __init__(
        self,
        file: str = "",
        prompt: str = "prompt",
        answer: str = "answer",
        answer_after: str = "",
        template: str = "",
        system: str = "",
        chat: bool = True,
        held_out_file: str = "",
        held_out: int | float = 0,
        seed: int = 0,
    ):
        self.chat, self._system = chat, system
        self._template = prompt_template("jsonl", template, system, chat)
        read = partial(read_pairs, prompt=prompt, answer=answer, answer_after=answer_after)
        splits = read_splits("jsonl", read, file, held_out_file, held_out, seed)
        self._splits = {split: self._problems(pairs) for split, pairs in splits.items()}

    def reward(self, problem: Problem, completion: str) -> float:
        """1.0 when math-verify finds the completion's last answer equal to the problem's, else 0.0."""
        return NAMED_REWARDS["math"](problem, completion)

    def check(self, problem: Problem) -> None:
        """Raise ValueError for an answer that math-verify cannot read."""
        NAMED_REWARDS["math"].check(problem)

    def _problems(self, pairs: list[tuple[str, str]]) -> list[Problem]:
        return [
            Problem(i, self._template.replace(PLACE, prompt), answer, self._system)
            for i, (prompt, answer) in enumerate(pairs)
        ]


def read_pairs(
    file: str, prompt: str = "prompt", answer: str = "answer", answer_after: str = ""
) -> list[tuple[str, str]]:
    """(prompt, answer) of each line, from these columns. Raises ValueError that names file and wrong line.

    answer_after: see Jsonl.
    """
    pairs = []
    for where, values in read_records("jsonl", file, {"prompt": prompt, "answer": answer}, "problems"):
        text = _answer(values[1], where, answer)
        text = _after(text, answer_after, where) if answer_after else text
        pairs.append((text_of(values[0], where, prompt), text))
    return pairs


def _answer(value: Any, where: str, column: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        raise ValueError(
            f'{where} must have an "{column}": a string that is not empty, or a number; this one is '
            f"{'empty' if value == '' else kind_of(value)}"
        )
    if not isinstance(value, str) and not abs(value) < float("inf"):
        raise ValueError(f"{where}: the answer ({value}) must be finite")
    return _short_enough(str(value), where)


def _after(answer: str, marker: str, where: str) -> str:
    """What follows the last `marker`. Raises ValueError where there is none, and where nothing follows it."""
    _, separator, rest = answer.rpartition(marker)
    if not separator or not rest.strip():
        what = "nothing after it" if separator else "no such text"
        raise ValueError(
            f"{where}: task.options.answer_after is {shown(marker)}, and the answer "
            f"{shown(answer[-60:])} has {what}"
        )
    return rest.strip()


def _short_enough(answer: str, where: str) -> str:
    if len(answer) > READ_CHARS:
        raise ValueError(
            f"{where}: the answer has {len(answer):,} characters, at most {READ_CHARS:,} are compared"
        )
    return answer
