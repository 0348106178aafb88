"""The first difference of two logs: its step, and in the step the first quantity in causal order.

The order is: prompts; the sampler's logprobs and drawn tokens, by position; the trainer's logprobs; rewards
and advantages; then the metrics of the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...verify.mismatch import bits_equal
from ..formats.record import LoggedRollout
from .metrics import Row, equal, is_machines
from .side import Digest, Placed, Side, rollouts_of, same

# What rollouts hold, in causal order, and the fields of a digest that show a difference of it.
_FIELDS = {
    "prompts": ("prompt_ids", "prompt_text"),
    "completions": ("completion_ids", "completion_text", "mask", "logprobs"),
    "trainer": ("trainer_logprobs",),
    "values": ("values", "experts"),
}


@dataclass(frozen=True)
class Difference:
    """The first difference of two logs.

    kind: length (one log ends), count (of completions), prompts, draws (equal logprobs, other tokens),
    numbers (the sampler's logprobs), texts, mask, trainer, values, or metrics.
    """

    kind: str
    step: int  # in the numbers of the rollouts
    words: str
    metrics: tuple[str, ...] = ()  # those that differ, where rollouts do not
    size: str = ""  # of a difference of logprobs


def moments(a: Side, b: Side, shift: int) -> list[int]:
    """The steps of both in the numbers of the rollouts. shift: what the metrics of a step are ahead by."""
    known = {*a.steps, *b.steps, *(m - shift for m in (*a.metrics, *b.metrics))}
    return sorted(known)


def common_steps(a: Side, b: Side, shift: int) -> list[int]:
    """The steps of which both have the rollouts, or both the metrics."""
    return [
        m
        for m in moments(a, b, shift)
        if _both(a.steps, b.steps, m) or _both(a.metrics, b.metrics, m + shift)
    ]


def _both(a: dict[int, Any], b: dict[int, Any], step: int) -> bool:
    return step in a and step in b


def first_difference(a: Side, b: Side, shift: int = 0) -> Difference | None:
    """The first difference in the steps that both have; a log that ends, or lacks a step, differs too."""
    common = common_steps(a, b, shift)
    for moment in moments(a, b, shift):
        if moment < common[0]:
            continue  # a run that was resumed may log from there
        if lost := _lost(a, b, moment, shift):
            return lost
        if _both(a.steps, b.steps, moment) and (found := _of_rollouts(a, b, moment)):
            return found
        if _both(a.metrics, b.metrics, moment + shift) and (found := _of_metrics(a, b, moment, shift)):
            return found
    return None


def _lost(a: Side, b: Side, moment: int, shift: int) -> Difference | None:
    """A step that one log has and the other lacks, where both have steps of its kind."""
    for tables, step, what in (
        ((a.steps, b.steps), moment, "rollouts"),
        ((a.metrics, b.metrics), moment + shift, "metrics"),
    ):
        if not all(tables) or (step in tables[0]) == (step in tables[1]):
            continue
        longer, shorter = (a, b) if step in tables[0] else (b, a)
        if step < min(tables[0 if longer is b else 1]):
            continue
        if what == "metrics":
            if not a.numbered:
                words = f"after row {step}: {len(a.metrics)} and {len(b.metrics)} rows"
            else:
                words = f"at step {step}: {longer.path} has metrics, and {shorter.path} has none"
        else:
            count = sum(len(s.rollouts) for n, s in shorter.steps.items() if n < step)
            (place, _), *_ = rollouts_of(longer, step)
            ends = "ends" if step > max(shorter.steps) else f"lacks step {step}"
            words = f"after {count} completions: {shorter.path} {ends}, and {longer.path} goes on at {place}"
        return Difference("length", moment, words)
    return None


def _of_rollouts(a: Side, b: Side, moment: int) -> Difference | None:
    """The first difference of the rollouts of one step."""
    digests = a.steps[moment].rollouts, b.steps[moment].rollouts
    order = _pairs(*([d.key for d in side] for side in digests))
    unequal = [(i, j) for i, j in order if _unequal(digests[0][i], digests[1][j])]
    if len(digests[0]) == len(digests[1]) and not unequal:
        return None
    step = f"at step {moment}: " if a.numbered else ""
    rollouts = rollouts_of(a, moment), rollouts_of(b, moment)
    if len(digests[0]) != len(digests[1]):
        places = f"{rollouts[0][0][0]} and {rollouts[1][0][0]}"
        words = f"{step}{len(digests[0])} and {len(digests[1])} completions ({places})"
        return Difference("count", moment, words)
    pairs = [(rollouts[0][i], rollouts[1][j]) for i, j in unequal]
    kind, words = _in_words(pairs)
    return Difference(kind, moment, step + words, size=_size(pairs) if kind == "numbers" else "")


def _pairs(a: list[tuple], b: list[tuple]) -> list[tuple[int, int]]:
    """Completions in pairs: by prompt and sample where both name them, else by their order."""
    if len(set(a)) != len(a) or set(a) != set(b):
        return [(i, i) for i in range(min(len(a), len(b)))]
    where = {key: j for j, key in enumerate(b)}
    return [(i, where[key]) for i, key in enumerate(a)]


def _unequal(x: Digest, y: Digest) -> bool:
    for names in _FIELDS.values():
        for name in names:
            p, q = getattr(x, name), getattr(y, name)
            if not (all(map(same, p, q)) if name == "values" else same(p, q)):
                return True
    return False


def _in_words(pairs: list[tuple[Placed, Placed]]) -> tuple[str, str]:
    """The kind of the first difference of a step, in causal order, and its words.

    Other logprobs of the sampler come before other tokens, in whichever completion they stand: a run with
    other weights draws other tokens too.
    """
    for kind, compare in _COMPARISONS.items():
        for (place_a, x), (place_b, y) in pairs:
            if words := compare(x, y):
                return kind, f"{words} ({place_a} and {place_b})"
    raise AssertionError("hashes differ and contents do not")


def _prompts(x: LoggedRollout, y: LoggedRollout) -> str:
    if x.prompt_ids is not None and y.prompt_ids is not None:
        return _sequences("prompt token", x.prompt_ids, y.prompt_ids)
    return _texts("prompt", x.prompt_text, y.prompt_text)


def _places(x: LoggedRollout, y: LoggedRollout) -> tuple[int | None, int | None]:
    """Where the first other token stands, and the first other logprob of the sampler."""
    if x.completion_ids is None or y.completion_ids is None:
        return None, None
    return first_unequal(x.completion_ids, y.completion_ids), _first_number(x.logprobs, y.logprobs)


def _numbers(x: LoggedRollout, y: LoggedRollout) -> str:
    """The first other logprob of the sampler, where no other token comes before or with it."""
    token, logprob = _places(x, y)
    if logprob is None or (token is not None and token <= logprob):
        return ""
    a, b = float(x.logprobs[logprob]), float(y.logprobs[logprob])
    later = "" if token is None else f"; the first other token follows at position {token}"
    return f"sampler's logprob at position {logprob}: {a!r} and {b!r}{later}"


def _draws(x: LoggedRollout, y: LoggedRollout) -> str:
    """The first other token."""
    token, _ = _places(x, y)
    if token is None:
        return ""
    before = "" if x.logprobs is None or y.logprobs is None else ", and every logprob before it is equal"
    return _sequences("completion token", x.completion_ids, y.completion_ids) + before


def _completion_texts(x: LoggedRollout, y: LoggedRollout) -> str:
    if x.completion_ids is not None and y.completion_ids is not None:
        return ""
    return _texts("completion", x.completion_text, y.completion_text)


def _masks(x: LoggedRollout, y: LoggedRollout) -> str:
    if x.completion_ids is None or y.completion_ids is None:
        return ""
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
        if not same(a, b):
            return f"{name.replace('weight_span', 'weight version')} {a!r} and {b!r}"
    experts = (x.routed_experts, y.routed_experts)
    if all(e is not None for e in experts) and not np.array_equal(*experts):
        return "routed experts"
    return ""


_COMPARISONS: dict[str, Callable[[LoggedRollout, LoggedRollout], str]] = {
    "prompts": _prompts,
    "numbers": _numbers,
    "draws": _draws,
    "texts": _completion_texts,
    "mask": _masks,
    "trainer": _trainer,
    "values": _values,
}


def _size(pairs: list[tuple[Placed, Placed]]) -> str:
    """How far the sampler's logprobs are apart, over the tokens before the first other one."""
    gaps = []
    for (_, x), (_, y) in pairs:
        token, _ = _places(x, y)
        if x.logprobs is not None and y.logprobs is not None:
            a, b = (r.logprobs[:token].astype(np.float64) for r in (x, y))
            length = min(len(a), len(b))
            gaps.append(np.abs(a[:length] - b[:length]))
    gap = np.concatenate(gaps)
    gap = gap[~np.isnan(gap)]
    return f"{gap.mean():.2g} nats a token on average and {gap.max():.2g} at most, in {len(gap)} tokens"


def _sequences(name: str, x: Sequence, y: Sequence) -> str:
    position = first_unequal(x, y)
    if position is None:
        return ""
    if position == min(len(x), len(y)):
        return f"{name}s: {len(x)} and {len(y)}, equal as far as both go"
    return f"{name} at position {position}: {x[position]!r} and {y[position]!r}"


def _texts(name: str, x: str | None, y: str | None) -> str:
    if x is None or y is None or x == y:
        return ""
    position = first_unequal(x, y)
    a, b = (text[position : position + 20] for text in (x, y))
    return f"{name} at character {position}: {a!r} and {b!r}"


def first_unequal(x: Sequence, y: Sequence) -> int | None:
    """The first index at which two sequences differ; the length of the shorter where it is their only one."""
    if x == y:
        return None
    return next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y)))


def _first_number(x: np.ndarray | None, y: np.ndarray | None) -> int | None:
    """The first index at which the bits of two fp32 columns differ, as far as both go."""
    if x is None or y is None or np.isnan(x).all() or np.isnan(y).all():
        return None
    length = min(len(x), len(y))
    a, b = x[:length], y[:length]
    different = np.flatnonzero(~bits_equal(a, b) & ~(np.isnan(a) & np.isnan(b)))
    return int(different[0]) if len(different) else None


def unequal_metrics(x: Row, y: Row) -> list[str]:
    """The metrics of two rows that both have and that differ, in their order."""
    return [name for name in x if name in y and not is_machines(name) and not equal(x[name], y[name])]


def _of_metrics(a: Side, b: Side, moment: int, shift: int) -> Difference | None:
    step = moment + shift
    x, y = a.metrics[step], b.metrics[step]
    names = unequal_metrics(x, y)
    if not names:
        return None
    rows = a.rows[step], b.rows[step]
    where = f"row {rows[0]} of both" if rows[0] == rows[1] else f"rows {rows[0]} and {rows[1]}"
    place = f"step {step}" if a.numbered else f"row {rows[0]}"
    first = names[0]
    words = f"at {place}: {first} {x[first]!r} and {y[first]!r} ({where})"
    return Difference("metrics", moment, words, tuple(names))
