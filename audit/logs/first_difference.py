"""The first difference of two logs: its step, and in the step the first quantity in causal order.

The order is: prompts; the sampler's logprobs and drawn tokens, by position; the trainer's logprobs; rewards
and advantages; then the metrics of the step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...verify.difference import Difference, compare_values, differences, first_in_order, first_unequal
from ...verify.mismatch import first_unequal_bits
from ..formats.record import LoggedRollout
from .metric_rows import Row, equal, is_machines
from .side import Digest, Placed, Side, rollouts_of, same

# Fields of a digest that show a difference of a rollout, beside its values.
_HASHES = ("prompt_ids", "prompt_text", "completion_ids", "completion_text", "mask", "logprobs")
_HASHES += ("trainer_logprobs", "experts")


@dataclass(frozen=True)
class LogDifference:
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


def first_difference(a: Side, b: Side, shift: int = 0) -> LogDifference | None:
    """The first difference in the steps that both have; a log that ends, or lacks a step, differs too."""
    begin = common_steps(a, b, shift)[0]  # a run that was resumed may log from there
    each = (_at_moment(a, b, m, shift) for m in moments(a, b, shift) if m >= begin)
    return next(filter(None, each), None)


def _at_moment(a: Side, b: Side, moment: int, shift: int) -> LogDifference | None:
    first = _lost(a, b, moment, shift)
    if not first and _both(a.steps, b.steps, moment):
        first = _in_rollouts(a, b, moment)
    if not first and _both(a.metrics, b.metrics, moment + shift):
        first = _in_metrics(a, b, moment, shift)
    return first


def _lost(a: Side, b: Side, moment: int, shift: int) -> LogDifference | None:
    """A step that one log has and the other lacks, where both have steps of its kind."""
    for kind, step in (("steps", moment), ("metrics", moment + shift)):
        tables = getattr(a, kind), getattr(b, kind)
        if not all(tables) or (step in tables[0]) == (step in tables[1]):
            continue
        longer, shorter = (a, b) if step in tables[0] else (b, a)
        if step < min(getattr(shorter, kind)):
            continue
        if kind == "steps":
            count = sum(len(s.rollouts) for n, s in shorter.steps.items() if n < step)
            (place, _), *_ = rollouts_of(longer, step)
            ends = "ends" if step > max(shorter.steps) else f"lacks step {step}"
            words = f"after {count} completions: {shorter.path} {ends}, and {longer.path} goes on at {place}"
        elif a.numbered:
            words = f"at step {step}: {longer.path} has metrics, and {shorter.path} has none"
        else:
            words = f"after row {step}: {len(a.metrics)} and {len(b.metrics)} rows"
        return LogDifference("length", moment, words)
    return None


def _in_rollouts(a: Side, b: Side, moment: int) -> LogDifference | None:
    """The first difference of the rollouts of one step.

    Other logprobs of the sampler come before other tokens, in whichever completion they stand: a run with
    other weights draws other tokens too.
    """
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
        return LogDifference("count", moment, words)
    pairs = [(rollouts[0][i], rollouts[1][j]) for i, j in unequal]
    first = first_in_order(_COMPARISONS, pairs, lambda kind, x, y: _COMPARISONS[kind](x[1], y[1]))
    assert first is not None, "hashes differ and contents do not"
    kind, ((place_a, _), (place_b, _)), difference = first
    size = _size(pairs) if kind == "numbers" else ""
    return LogDifference(kind, moment, f"{step}{difference} ({place_a} and {place_b})", size=size)


def _pairs(a: list[tuple], b: list[tuple]) -> list[tuple[int, int]]:
    """Completions in pairs: by prompt and sample where both name them, else by their order."""
    if len(set(a)) != len(a) or set(a) != set(b):
        return [(i, i) for i in range(min(len(a), len(b)))]
    where = {key: j for j, key in enumerate(b)}
    return [(i, where[key]) for i, key in enumerate(a)]


def _unequal(x: Digest, y: Digest) -> bool:
    hashes = ((getattr(x, name), getattr(y, name)) for name in _HASHES)
    return not all(same(p, q) for p, q in (*hashes, *zip(x.values, y.values, strict=True)))


def _logged(quantity: str, x: Any, y: Any) -> Difference | None:
    """How two values differ; one that only one log has is no difference."""
    return None if x is None or y is None else compare_values(quantity, x, y)


def _prompts(x: LoggedRollout, y: LoggedRollout) -> Difference | None:
    if x.prompt_ids is not None and y.prompt_ids is not None:
        return compare_values("prompt token", x.prompt_ids, y.prompt_ids)
    return _logged("prompt", x.prompt_text, y.prompt_text)


def _places(x: LoggedRollout, y: LoggedRollout) -> tuple[int | None, int | None]:
    """Where the first other token stands, and the first other logprob of the sampler."""
    if x.completion_ids is None or y.completion_ids is None:
        return None, None
    return first_unequal(x.completion_ids, y.completion_ids), _first_number(x.logprobs, y.logprobs)


def _numbers(x: LoggedRollout, y: LoggedRollout) -> Difference | None:
    """The first other logprob of the sampler, where no other token comes before or with it."""
    token, logprob = _places(x, y)
    if logprob is None or (token is not None and token <= logprob):
        return None
    later = "" if token is None else f"; the first other token follows at position {token}"
    return replace(_number("sampler's logprob", x.logprobs, y.logprobs), note=later)


def _draws(x: LoggedRollout, y: LoggedRollout) -> Difference | None:
    """The first other token."""
    first = _logged("completion token", x.completion_ids, y.completion_ids)
    if first is None or x.logprobs is None or y.logprobs is None:
        return first
    return replace(first, note=f"{first.note}, and every logprob before it is equal")


def _completion_texts(x: LoggedRollout, y: LoggedRollout) -> Difference | None:
    if x.completion_ids is not None and y.completion_ids is not None:
        return None
    return _logged("completion", x.completion_text, y.completion_text)


def _masks(x: LoggedRollout, y: LoggedRollout) -> Difference | None:
    if x.completion_ids is None or y.completion_ids is None:
        return None
    return compare_values("mask", x.drawn().tolist(), y.drawn().tolist())


def _trainer(x: LoggedRollout, y: LoggedRollout) -> Difference | None:
    return _number("trainer's logprob", x.trainer_logprobs, y.trainer_logprobs)


def _values(x: LoggedRollout, y: LoggedRollout) -> Difference | None:
    """What comes after the tokens; a value that only one log has is no difference."""
    for name in ("reward", "advantage", "weight_span"):
        a, b = getattr(x, name), getattr(y, name)
        if not same(a, b):
            return Difference(name.replace("weight_span", "weight version"), (a, b))
    experts = (x.routed_experts, y.routed_experts)
    if all(e is not None for e in experts) and not np.array_equal(*experts):
        return Difference("routed experts")
    return None


_COMPARISONS: dict[str, Callable[[LoggedRollout, LoggedRollout], Difference | None]] = {
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


def _number(quantity: str, x: np.ndarray | None, y: np.ndarray | None) -> Difference | None:
    i = _first_number(x, y)
    return None if i is None else Difference(quantity, (float(x[i]), float(y[i])), f"at position {i}")


def _first_number(x: np.ndarray | None, y: np.ndarray | None) -> int | None:
    """The first index at which the bits of two columns differ; a column without numbers says nothing."""
    if x is None or y is None or np.isnan(x).all() or np.isnan(y).all():
        return None
    return first_unequal_bits(x, y)


def unequal_metrics(x: Row, y: Row) -> list[Difference]:
    """The metrics of two rows that both have and that differ, in their order."""
    return [d for d in differences(x, y, equal) if d.missing is None and not is_machines(d.quantity)]


def _in_metrics(a: Side, b: Side, moment: int, shift: int) -> LogDifference | None:
    step = moment + shift
    unequal = unequal_metrics(a.metrics[step], b.metrics[step])
    if not unequal:
        return None
    rows = a.rows[step], b.rows[step]
    where = f"row {rows[0]} of both" if rows[0] == rows[1] else f"rows {rows[0]} and {rows[1]}"
    place = f"step {step}" if a.numbered else f"row {rows[0]}"
    words = f"at {place}: {unequal[0]} ({where})"
    return LogDifference("metrics", moment, words, tuple(d.quantity for d in unequal))
