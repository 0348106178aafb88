"""Problems from a file of JSON objects, a line each: one column is the prompt, another one the answer."""

from typing import Any

from ...files.inputs import read_bytes
from ...files.reading import parse_json, shown
from ...kernels.philox import Stream, permutation
from .answers import NAMED_REWARDS, READ_CHARS
from .base import Problem, split_problems

_LARGEST_FILE_BYTES = 1 << 30
_PLACE = "{prompt}"
# Columns of a file that a message names.
_MOST_COLUMNS = 12


class Jsonl:
    """The problems of `file`. The reward is math-verify's; task.reward names another.

    prompt, answer: names of columns. answer_after: only what follows the last occurrence of this text is the
    answer; GSM8K has "####". template: the prompt that the model sees, with {prompt} for that of the file.
    system: the system prompt. chat: whether prompts go through the tokenizer's chat template.

    The held-out split is `held_out_file`, or `held_out` lines of `file`, chosen by `seed`: a number of lines,
    or a share between 0 and 1.

    Raises ValueError for a missing or empty file, and for a malformed line, whose number it names.
    """

    binary = True

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
        if template and _PLACE not in template:
            raise ValueError(f"task jsonl: template ({shown(template)}) must hold {_PLACE}")
        if system and not chat:
            raise ValueError("task jsonl: system needs a chat template; leave out chat = false, or system")
        if held_out and held_out_file:
            raise ValueError("task jsonl: held_out and held_out_file are two ways to say the same; give one")
        self.chat, self._template, self._system = chat, template or _PLACE, system
        pairs = read_pairs(file, prompt, answer, answer_after)
        if held_out_file:
            others = read_pairs(held_out_file, prompt, answer, answer_after)
            self._splits = {"train": self._problems(pairs), "held_out": self._problems(others)}
        else:
            n = _count(held_out, len(pairs))
            shuffled = [pairs[i] for i in permutation(len(pairs), seed, Stream.PROBLEMS)]
            splits = split_problems(shuffled, len(pairs) - n, n, "jsonl")
            self._splits = {
                split: self._problems([(p.prompt, p.answer) for p in problems])
                for split, problems in splits.items()
            }

    def problems(self, split: str) -> list[Problem]:
        return self._splits[split]

    def reward(self, problem: Problem, completion: str) -> float:
        """1.0 when math-verify finds the completion's last answer equal to the problem's, else 0.0."""
        return NAMED_REWARDS["math"](problem, completion)

    def check(self, problem: Problem) -> None:
        """Raise ValueError for an answer that math-verify cannot read."""
        NAMED_REWARDS["math"].check(problem)

    def _problems(self, pairs: list[tuple[str, str]]) -> list[Problem]:
        return [
            Problem(i, self._template.replace(_PLACE, prompt), answer, self._system)
            for i, (prompt, answer) in enumerate(pairs)
        ]


def _count(held_out: int | float, lines: int) -> int:
    """The number of held-out lines: held_out itself, or its share of the lines, at least one."""
    if isinstance(held_out, int):
        return held_out
    if not 0 < held_out < 1:
        raise ValueError(
            f"task jsonl: held_out ({held_out}) must be a number of lines, or a share between 0 and 1"
        )
    return max(1, int(held_out * lines))


def read_pairs(
    file: str, prompt: str = "prompt", answer: str = "answer", answer_after: str = ""
) -> list[tuple[str, str]]:
    """(prompt, answer) of each line, from these columns. Raises ValueError that names file and wrong line.

    answer_after: see Jsonl.
    """
    if not file:
        raise ValueError('task jsonl: needs a file; set task.options = { file = "problems.jsonl" }')
    pairs = []
    for number, line in enumerate(_lines(file), 1):
        if not line.strip():
            continue
        where = f"task jsonl: {file} line {number}"
        try:
            record = parse_json(line)
        except ValueError as error:
            raise ValueError(f"{where} {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f'{where} must be an object with "{prompt}" and "{answer}"')
        for option, column in (("prompt", prompt), ("answer", answer)):
            if column not in record:
                raise ValueError(
                    f'{where} must have {_article(option)} "{column}"; it has {_columns(record)}: name the '
                    f"column in task.options.{option}"
                )
        pairs.append((_prompt(record[prompt], where, prompt), _answer(record[answer], where, answer)))
        if answer_after:
            pairs[-1] = (pairs[-1][0], _after(pairs[-1][1], answer_after, where))
    if not pairs:
        raise ValueError(f"task jsonl: {file} holds no problems")
    return pairs


def _lines(file: str) -> list[str]:
    try:
        content = read_bytes(file, _LARGEST_FILE_BYTES)
        return content.decode().split("\n")  # not splitlines: it also cuts at U+2028, which JSON allows
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"task jsonl: {file} line {number} is not UTF-8 ({error.reason})") from None
    except OSError as error:
        raise ValueError(f"task jsonl: {file} cannot be read ({error.strerror})") from None


def _article(option: str) -> str:
    return "an" if option == "answer" else "a"


def _columns(record: dict[str, Any]) -> str:
    names = ", ".join(shown(name) for name in [*record][:_MOST_COLUMNS])
    more = f" and {len(record) - _MOST_COLUMNS} more" if len(record) > _MOST_COLUMNS else ""
    return f"{names}{more}" if record else "no column"


def _prompt(value: Any, where: str, column: str) -> str:
    if not isinstance(value, str) or not value.strip():
        is_empty = isinstance(value, str)
        raise ValueError(
            f'{where} must have a "{column}": a string that is not empty; this one is '
            f"{'empty' if is_empty else _kind(value)}"
        )
    return value


def _answer(value: Any, where: str, column: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        raise ValueError(
            f'{where} must have an "{column}": a string that is not empty, or a number; this one is '
            f"{'empty' if value == '' else _kind(value)}"
        )
    if not isinstance(value, str) and not abs(value) < float("inf"):
        raise ValueError(f"{where}: the answer ({value}) must be finite")
    return _short_enough(str(value), where)


def _after(answer: str, marker: str, where: str) -> str:
    """What follows the last `marker`. Raises ValueError where there is none, and where nothing follows it."""
    _, found, rest = answer.rpartition(marker)
    if not found or not rest.strip():
        what = "nothing after it" if found else "no such text"
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


def _kind(value: Any) -> str:
    kinds = {list: "a list", dict: "an object", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
