"""The first difference of two logs of rollouts, or of two files of metrics, of any framework."""

from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest
from pathlib import Path

import numpy as np

from ...engine.display.terminal import console
from ...verify.ledger import LEDGER
from ..formats.record import LoggedRollout
from ..formats.registry import holds_logs, read_rollouts
from .metrics_diff import diff_metrics, is_metrics

# What a first difference tells, by how its words begin.
_MEANINGS = {
    "prompt": "So the two were given other prompts, or their tokenizers differ: no engine computed yet.",
    "sampler's logprob": "So the sampler computed other numbers for the same tokens: other weights, kernels, "
    "caches or requests beside it. Seeds are not the cause.",
    "completion token": "So the sampler computed the same numbers and drew otherwise: compare seeds, and the "
    "order of requests where one generator draws for all.",
    "trainer's logprob": "So the rollouts are equal, and the trainer computed other numbers for them: other "
    "weights, kernels or micro-batches.",
    "reward": "So the rollouts are equal, and the reward is not a function of them.",
}
Placed = tuple[str, LoggedRollout]


def is_log(path: Path) -> bool:
    """Whether a path looks like a log or like metrics, and not like a run or a trace."""
    if path.is_file():
        return path.suffix in (".jsonl", ".json", ".csv", ".parquet", ".pt") and path.name != LEDGER
    return path.is_dir() and not (path / LEDGER).exists() and holds_logs(path)


def are_logs(a: Path, b: Path) -> bool:
    """Whether both are logs; False where neither is. Raises ValueError where only one is."""
    if is_log(a) != is_log(b):
        raise ValueError(f"diff: {a} and {b} must both be logs, both be runs or both be traces")
    return is_log(a)


def diff_logs(a: Path, b: Path) -> int:
    """Print the first difference. Returns 0 when there is none, else 1. Raises ValueError for bad input."""
    try:
        if is_metrics(a) and is_metrics(b):
            (difference, seen), meaning = diff_metrics(a, b), ""
        else:
            difference, meaning, seen = _first_difference(a, b)
    except ValueError as error:
        raise ValueError(f"diff: {error}") from None
    console.print(f"first difference {difference}" if difference else f"equal: {seen}")
    if meaning:
        console.say(meaning)
    return 1 if difference else 0


def _first_difference(a: Path, b: Path) -> tuple[str, str, str]:
    """The first difference in words, or "", what it means, and how much was compared."""
    by_step = all(_has_steps(path) for path in (a, b))
    count = 0
    for chunk_a, chunk_b in zip_longest(_chunks(a, by_step), _chunks(b, by_step), fillvalue=[]):
        if not chunk_a or not chunk_b:
            longer, place = (a, chunk_a[0][0]) if chunk_a else (b, chunk_b[0][0])
            shorter = b if longer is a else a
            return f"after {count} completions: {shorter} ends, and {longer} goes on at {place}", "", ""
        if difference := _of_step(chunk_a, chunk_b):
            return *difference, ""
        count += len(chunk_a)
    return "", "", f"{count} completions"


def _has_steps(path: Path) -> bool:
    """Whether the first completion of a log names its step. Raises ValueError where there is none."""
    for _, rollout in read_rollouts(path):
        return rollout.step is not None
    raise ValueError(f"{path} holds no completion")


def _chunks(path: Path, by_step: bool) -> Iterator[list[Placed]]:
    """The completions of each step, in the order of the log; or each completion alone."""
    rollouts = read_rollouts(path)
    if not by_step:
        yield from ([placed] for placed in rollouts)
        return
    for _, group in groupby(rollouts, key=lambda placed: placed[1].step):
        yield list(group)


def _of_step(a: list[Placed], b: list[Placed]) -> tuple[str, str] | None:
    """The first difference of a step in causal order, and what it means.

    The order is: prompts, tokens and logprobs, the trainer's logprobs, rewards and advantages.
    """
    step_a, step_b = a[0][1].step, b[0][1].step
    if step_a != step_b and step_a is not None and step_b is not None:
        return f"{a[0][0]} is of step {step_a}, and {b[0][0]} of step {step_b}", ""
    step = "" if step_a is None else f"at step {step_a}: "
    pairs = _paired(a, b)
    if len(a) != len(b):
        return f"{step}{len(a)} and {len(b)} completions ({a[0][0]} and {b[0][0]})", ""
    for compare in (_prompts, _completions, _trainer, _values):
        for (place_a, x), (place_b, y) in pairs:
            if difference := compare(x, y):
                meaning = next(
                    (text for start, text in _MEANINGS.items() if difference.startswith(start)), ""
                )
                return f"{step}{difference} ({place_a} and {place_b})", meaning
    return None


def _paired(a: list[Placed], b: list[Placed]) -> list[tuple[Placed, Placed]]:
    """The completions of a step in pairs: by prompt and sample where both name them, else by their order."""
    keys_a, keys_b = ([_key(rollout) for _, rollout in side] for side in (a, b))
    named = len(set(keys_a)) == len(a) and set(keys_a) == set(keys_b)
    if not named:
        return list(zip(a, b, strict=False))
    by_key = dict(zip(keys_b, b, strict=True))
    return [(placed, by_key[key]) for key, placed in zip(keys_a, a, strict=True)]


def _key(rollout: LoggedRollout) -> tuple:
    return (rollout.prompt, rollout.sample, rollout.turn)


def _prompts(x: LoggedRollout, y: LoggedRollout) -> str:
    if x.prompt_ids is not None and y.prompt_ids is not None:
        return _sequences("prompt token", x.prompt_ids, y.prompt_ids)
    return _texts("prompt", x.prompt_text, y.prompt_text)


def _completions(x: LoggedRollout, y: LoggedRollout) -> str:
    """The first place where a drawn token or its logprob differs."""
    if x.completion_ids is None or y.completion_ids is None:
        return _texts("completion", x.completion_text, y.completion_text)
    token = _first(x.completion_ids, y.completion_ids)
    logprob = _first_number(x.logprobs, y.logprobs)
    if token is not None and (logprob is None or token <= logprob):
        before = "" if x.logprobs is None else ", and every logprob before it is equal"
        return _sequences("completion token", x.completion_ids, y.completion_ids) + before
    if logprob is not None:
        a, b = float(x.logprobs[logprob]), float(y.logprobs[logprob])
        later = "" if token is None else f"; the first other token follows at position {token}"
        return f"sampler's logprob at position {logprob}: {a!r} and {b!r}{later}"
    return _sequences("mask", x.drawn().tolist(), y.drawn().tolist())


def _trainer(x: LoggedRollout, y: LoggedRollout) -> str:
    position = _first_number(x.trainer_logprobs, y.trainer_logprobs)
    if position is None:
        return ""
    a, b = float(x.trainer_logprobs[position]), float(y.trainer_logprobs[position])
    return f"trainer's logprob at position {position}: {a!r} and {b!r}"


def _values(x: LoggedRollout, y: LoggedRollout) -> str:
    """What comes after the tokens; a value that only one log has is no difference."""
    for name in ("reward", "advantage", "weight_span"):
        a, b = getattr(x, name), getattr(y, name)
        if a is not None and b is not None and a != b and not (a != a and b != b):
            return f"{name.replace('weight_span', 'weight version')} {a!r} and {b!r}"
    experts = (x.routed_experts, y.routed_experts)
    if all(e is not None for e in experts) and not np.array_equal(*experts):
        return "routed experts"
    return ""


def _sequences(name: str, x: Sequence, y: Sequence) -> str:
    position = _first(x, y)
    if position is None:
        return ""
    if position == min(len(x), len(y)):
        return f"{name}s: {len(x)} and {len(y)}, equal as far as both go"
    return f"{name} at position {position}: {x[position]!r} and {y[position]!r}"


def _texts(name: str, x: str | None, y: str | None) -> str:
    if x is None or y is None or x == y:
        return ""
    position = _first(x, y)
    a, b = (text[position : position + 20] for text in (x, y))
    return f"{name} at character {position}: {a!r} and {b!r}"


def _first(x: Sequence, y: Sequence) -> int | None:
    """The first index at which two sequences differ; the length of the shorter where it is their only one."""
    if x == y:
        return None
    return next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y)))


def _first_number(x: np.ndarray | None, y: np.ndarray | None) -> int | None:
    """The first index at which the bits of two fp32 columns differ, as far as both go."""
    if x is None or y is None:
        return None
    length = min(len(x), len(y))
    a, b = x[:length], y[:length]
    different = np.flatnonzero((a.view(np.int32) != b.view(np.int32)) & ~(np.isnan(a) & np.isnan(b)))
    return int(different[0]) if len(different) else None
