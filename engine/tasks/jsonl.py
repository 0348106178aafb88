"""Problems from a file of {"prompt": ..., "answer": ...} lines, with math-verify as the reward."""

import logging

from ...kernels.philox import Stream, permutation
from ...verify.inputs import read_bytes
from ...verify.reading import parse_json, shown
from .base import Problem, split_problems

# Characters at the end of a completion in which its answer is searched, and the most of a problem's answer.
_READ_CHARS = 4096
_LARGEST_FILE_BYTES = 1 << 30
# The largest exponent, and the largest number under a factorial, in an answer. sympy would take hours to
# write out 9^(9^9).
_LARGEST_POWER = 1000


class Jsonl:
    """The problems of `file`. The held-out split is `held_out_file`, or `held_out` lines drawn from `file`.

    Raises ValueError for a missing or empty file, and for a malformed line, whose number it names.
    """

    chat = True

    def __init__(self, file: str = "", held_out_file: str = "", held_out: int = 0, seed: int = 0):
        # math-verify warns that it has no time limit (see reward).
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        pairs = read_pairs(file)
        if held_out_file:
            held_out_pairs = read_pairs(held_out_file)
            self._splits = split_problems(pairs, len(pairs), 0, "jsonl")
            self._splits["held_out"] = split_problems(held_out_pairs, len(held_out_pairs), 0, "jsonl")[
                "train"
            ]
        else:
            shuffled = [pairs[i] for i in permutation(len(pairs), seed, Stream.PROBLEMS)]
            self._splits = split_problems(shuffled, len(pairs) - held_out, held_out, "jsonl")

    def problems(self, split: str) -> list[Problem]:
        """See Task."""
        return self._splits[split]

    def reward(self, problem: Problem, completion: str) -> float:
        """1.0 when math-verify finds the completion's last answer equal to the problem's, else 0.0."""
        from math_verify import parse, verify

        # No time limits: on a busy machine they would decide a reward. Bounds on length and size keep the
        # comparison short instead.
        gold = parse(f"${problem.answer}$", parsing_timeout=None)
        if not gold:
            answer = shown(problem.answer)
            raise ValueError(f"math-verify cannot read the answer {answer} of problem {problem.id}")
        if not all(map(_can_be_computed, gold)):
            answer = shown(problem.answer)
            raise ValueError(f"the answer {answer} of problem {problem.id} would take too long to compute")
        answers = [x for x in parse(completion[-_READ_CHARS:], parsing_timeout=None) if _can_be_computed(x)]
        return float(verify(gold, answers, timeout_seconds=None))


def _can_be_computed(x: object) -> bool:
    """Whether a comparison with x takes a bounded time.

    It does for a string, and for an expression without towers of powers, large factorials, sums, products and
    integrals.
    """
    from sympy import Basic, Integral, Pow, Product, Sum, factorial, preorder_traversal

    if not isinstance(x, Basic):
        return True
    for node in preorder_traversal(x):
        if isinstance(node, Sum | Product | Integral):
            return False
        grows = node.exp if isinstance(node, Pow) else node.args[0] if isinstance(node, factorial) else None
        if (
            grows is not None
            and not grows.free_symbols
            and not (grows.is_Rational and abs(grows) <= _LARGEST_POWER)
        ):
            return False
    return True


def read_pairs(file: str) -> list[tuple[str, str]]:
    """(prompt, answer) of each line. Raises ValueError that names the file and the wrong line."""
    if not file:
        raise ValueError('task jsonl: needs a file; set task.options = { file = "problems.jsonl" }')
    try:
        content = read_bytes(file, _LARGEST_FILE_BYTES)
        lines = content.decode().split("\n")  # not splitlines: it also cuts at U+2028, which JSON allows
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"task jsonl: {file} line {number} is not UTF-8 ({error.reason})") from None
    except OSError as error:
        raise ValueError(f"task jsonl: {file} cannot be read ({error.strerror})") from None
    pairs = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
        except ValueError as error:
            raise ValueError(f"task jsonl: {file} line {number} {error}") from None
        if not isinstance(record, dict) or not record.get("prompt") or not isinstance(record["prompt"], str):
            raise ValueError(
                f'task jsonl: {file} line {number} must be an object with "prompt" '
                '(a string that is not empty) and "answer"'
            )
        if (
            isinstance(record.get("answer"), bool)
            or not isinstance(record.get("answer"), str | int | float)
            or record["answer"] == ""
        ):
            raise ValueError(
                f'task jsonl: {file} line {number} must have an "answer": '
                "a string that is not empty, or a number"
            )
        answer = record["answer"]
        if not isinstance(answer, str) and not abs(answer) < float("inf"):
            raise ValueError(f"task jsonl: {file} line {number}: the answer ({answer}) must be finite")
        if len(answer := str(answer)) > _READ_CHARS:
            raise ValueError(
                f"task jsonl: {file} line {number}: the answer has {len(answer):,} characters, "
                f"at most {_READ_CHARS:,} are compared"
            )
        pairs.append((record["prompt"], answer))
    if not pairs:
        raise ValueError(f"task jsonl: {file} holds no problems")
    return pairs
