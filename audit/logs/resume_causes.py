"""What the first difference of two logs tells of the state that a resumed run has lost, and what it does not.

A training loop has six states: the weights, the optimizer's, the data loader's, the sampler's random
generator, the learning rate's schedule and the loss scaler's. Each enters a step at another place, so the
place of the first difference tells which one is another: weights make other numbers for the same tokens, a
generator draws other tokens from the same numbers, an optimizer makes other weights of the same gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from .factors import factor_words
from .first_difference import LogDifference, common_steps, unequal_metrics
from .metric_rows import GRADIENT_NORM, LEARNING_RATE, LOSS_SCALE, number
from .prompt_order import loader_words, moved
from .seeds import seed_of
from .side import Side


@dataclass(frozen=True)
class Logs:
    """Two logs, how their steps go together, and the steps that both have."""

    a: Side
    b: Side
    shift: int  # metrics of step s + shift are those of the rollouts of step s
    common: list[int]

    @classmethod
    def of(cls, a: Side, b: Side, shift: int) -> "Logs":
        """Two logs. shift: see shift_of."""
        return cls(a, b, shift, common_steps(a, b, shift))

    def rows(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The metrics of both at a step of the rollouts; empty where one has none."""
        x, y = (side.metrics.get(step + self.shift) for side in (self.a, self.b))
        return (x, y) if x and y else ({}, {})

    def names(self, pattern: Any) -> list[str]:
        """The metrics of both that are called so."""
        rows = [self.rows(step) for step in self.common]
        return list(dict.fromkeys(n for x, y in rows for n in x if n in y and pattern.search(n)))

    @property
    def resumed(self) -> bool:
        """Whether one log begins at a later step than the other: it is of a run that was resumed there."""
        return any(
            p and q and min(p) != min(q)
            for p, q in ((self.a.steps, self.b.steps), (self.a.metrics, self.b.metrics))
        )


def shift_of(a: Side, b: Side) -> int:
    """How many steps the metrics of a log are ahead of its rollouts: 0, or 1 as in TRL.

    TRL names rollouts by the updates before them and metrics by the updates after them. The first steps show
    it, where rollouts and metrics were logged from the same step on.
    """
    shifts = {min(side.metrics) - min(side.steps) for side in (a, b) if side.metrics and side.steps}
    return 1 if shifts == {1} else 0


def conclude(logs: Logs, first: LogDifference) -> Iterator[str]:
    """What follows from the first difference, in sentences."""
    yield from _schedule(logs)
    if first.kind == "metrics":
        yield from _of_metrics(logs, first)
    elif rule := _RULES.get(first.kind):
        yield from rule(logs, first)


def _loader(logs: Logs, first: LogDifference) -> Iterator[str]:
    """Other prompts: where do those of B stand in A?"""
    yield from loader_words(logs.a, logs.b, first.step)
    if logs.a.metrics and logs.b.metrics:
        yield (
            "Not concluded: whether optimizer and generators were restored. All that follows from other "
            "prompts differs."
        )


def _schedule(logs: Logs) -> Iterator[str]:
    """Another learning rate. It depends on no data, so it is compared in all steps."""
    for name in logs.names(LEARNING_RATE):
        rates = {s: tuple(number(row.get(name)) for row in logs.rows(s)) for s in logs.common}
        other = [s for s, (x, y) in rates.items() if x != y and None not in (x, y)]
        if not other:
            continue
        first = other[0]
        mine = {
            s - logs.shift: value
            for s, row in logs.a.metrics.items()
            if (value := number(row.get(name))) is not None
        }
        again = {s: y for s, (_, y) in rates.items() if s >= first and y is not None}
        start = moved({s: [x] for s, x in mine.items()}, {s: [y] for s, y in again.items()}, first)
        if start is None:
            yield (
                f"The learning rate ({name}) differs from step {first + logs.shift} on, and is none of A's: "
                "another schedule, or another length of the run."
            )
        elif start == min(mine):
            yield (
                f"The learning rate ({name}) of B from step {first + logs.shift} on is A's from its first "
                "step on: the schedule was not restored, and restarted."
            )
        else:
            yield (
                f"The learning rate ({name}) of B from step {first + logs.shift} on is A's from step "
                f"{start + logs.shift} on: the schedule stands at another step."
            )


def _of_metrics(logs: Logs, first: LogDifference) -> Iterator[str]:
    """Metrics that differ where the rollouts of the step, as far as they were logged, are equal."""
    x, y = logs.rows(first.step)
    scales = [n for n in first.metrics if LOSS_SCALE.search(n)]
    for name in scales:
        yield (
            f"The loss scale ({name}) differs and nothing before it does: the loss scaler's state was not "
            f"restored (B's is {y[name]}), or its settings are others."
        )
    norms = [n for n in first.metrics if GRADIENT_NORM.search(n)]
    overflow = [n for n in norms if _is_finite(x[n]) and not _is_finite(y[n])]
    if overflow and not scales:
        yield (
            f"B's {overflow[0]} is {y[overflow[0]]} where A's is finite: B's gradient overflowed. After a "
            "resume in fp16 this is a loss scaler that begins at its first scale again."
        )
        return
    rest = [n for n in first.metrics if n not in scales and not LEARNING_RATE.search(n)]
    rows = [logs.rows(s) for s in logs.common if s >= first.step]
    if words := factor_words([row for row in rows if all(row)], rest):
        yield words
        return
    if not rest or (scales and set(rest) == set(norms)):
        return
    if first.step in logs.a.steps and first.step in logs.b.steps:
        after = " A scale that differs changes the last bits of a gradient." if scales else ""
        yield (
            f"The rollouts of step {first.step} are equal, and {', '.join(rest[:3])} differ: the trainer "
            "computed otherwise from the same data. Its dropout's generator was not restored, or "
            f"micro-batches, kernels or the loss's settings are others.{after}"
        )
    elif logs.resumed or first.step > logs.common[0]:
        yield from _metrics_alone(logs, first, rest)


def _is_finite(value: Any) -> bool:
    x = number(value)
    return x is not None and isfinite(x)


def _metrics_alone(logs: Logs, first: LogDifference, rest: Sequence[str]) -> Iterator[str]:
    """Metrics without rollouts do not tell other data from other weights."""
    before = [s for s in logs.common if s < first.step]
    if not before:
        yield (
            f"{', '.join(rest[:3])} differ in the first step that both have: other data, other weights or "
            "another generator. Metrics alone do not tell which; log rollouts too."
        )
        return
    norms = [n for n in logs.names(GRADIENT_NORM) if n in logs.rows(before[-1])[0]]
    update = (
        f"{norms[0]} is equal at step {before[-1] + logs.shift}" if norms else "no gradient norm is logged"
    )
    yield (
        f"Equal until step {before[-1] + logs.shift}, and {', '.join(rest[:3])} differ after its update "
        f"({update}): the optimizer's state, or the data or generator of step {first.step + logs.shift}. "
        "Metrics alone do not tell which; log rollouts too."
    )


def _weights(logs: Logs, first: LogDifference) -> Iterator[str]:
    """Other numbers for the same tokens: after an equal step the update is at fault."""
    before = first.step - 1
    size = f" They differ by {first.size}." if first.size else ""
    who = "sampler" if first.kind == "numbers" else "trainer"
    plain = (
        f"So the {who} computed other numbers for the same tokens: other weights, kernels, caches or "
        f"requests beside it. Seeds are not the cause.{size}"
    )
    if before not in logs.common or not (logs.resumed or any(logs.rows(before))):
        if logs.resumed and first.step == logs.common[0]:
            yield (
                f"{plain} Step {first.step} is the first that both have: B began with other weights than A "
                "had there (another checkpoint, or weights that were rounded when they were saved), or its "
                "engine rounds otherwise."
            )
        else:
            yield plain
        return
    equal = _equal_at(logs, before)
    yield f"Equal at step {before} in {equal}, and other weights at step {first.step}.{size}"
    yield from _update(logs, before)


def _update(logs: Logs, step: int) -> Iterator[str]:
    """The update of an equal step made other weights."""
    if not logs.resumed:
        yield (
            f"If B was resumed at step {step}, the optimizer's state was lost; if at step {step + 1}, "
            "other weights were restored; --resumed_at tells them apart. If it was not resumed, settings "
            "of the optimizer differ."
        )
        return
    first = " It is the first after the resume." if step == logs.common[0] else ""
    norms, rates = (
        [n for n in logs.names(p) if n in logs.rows(step)[0]] for p in (GRADIENT_NORM, LEARNING_RATE)
    )
    if not norms:
        yield (
            f"So the update of step {step} differs: the optimizer's state, or the gradient, of which no norm "
            f"was logged.{first}"
        )
        return
    doubt = "" if rates else " The learning rate was not logged: it may be the cause as well."
    yield (
        "So the optimizer's state was lost: its moments, its count of steps, or fp32 master weights."
        f"{first} Other settings of the optimizer (betas, eps, weight decay, clipping) look the same.{doubt}"
    )


def _equal_at(logs: Logs, step: int) -> str:
    """What is known to be equal at a step, in words."""
    words = []
    if step in logs.a.steps and step in logs.b.steps:
        digests = logs.a.steps[step].rollouts + logs.b.steps[step].rollouts
        words = ["prompts"] if all(d.prompt for d in digests) else []
        words += ["tokens"] if all(d.completion_ids for d in digests) else []
        words += ["the sampler's logprobs"] if all(d.logprobs for d in digests) else []
        words += ["the trainer's logprobs"] if all(d.trainer_logprobs for d in digests) else []
    x, y = logs.rows(step)
    other = {d.quantity for d in unequal_metrics(x, y)}
    shared = [n for n in x if n in y and n not in other]
    words += ["gradient norm"] if any(GRADIENT_NORM.search(n) for n in shared) else []
    words += ["learning rate"] if any(LEARNING_RATE.search(n) for n in shared) else []
    return ", ".join(words) or "all that was logged"


def _draws(logs: Logs, first: LogDifference) -> Iterator[str]:
    yield (
        "So the sampler computed the same numbers and drew otherwise: compare seeds, and the order of "
        "requests where one generator draws for all."
    )
    if logs.resumed and first.step == logs.common[0]:
        yield (
            f"Step {first.step} is the first that both have: the state of the sampler's generator was not "
            "restored, or the seed is another. The weights are A's, as far as the equal logprobs show."
        )
    elif first.step == logs.common[0] and (x := seed_of(logs.a)) and (y := seed_of(logs.b)) and x[1] == y[1]:
        yield (
            f"It is the first step, and the seed of both is {x[1]} ({x[0]}): the draws depend on more than "
            "the seed. A number that Python's hash() makes of a text is another one in each process, unless "
            "PYTHONHASHSEED is set."
        )


def _texts(logs: Logs, first: LogDifference) -> Iterator[str]:
    if logs.resumed or logs.a.metrics:
        yield "Texts alone do not tell other weights from another draw; log token ids and logprobs."


def _trainer(logs: Logs, first: LogDifference) -> Iterator[str]:
    """Other numbers of the trainer. Without the sampler's column they are the only sight of the weights."""
    digests = [d for side in (logs.a, logs.b) for d in side.steps[first.step].rollouts]
    if any(d.logprobs is None for d in digests) and first.step - 1 in logs.common:
        yield from _weights(logs, first)
        return
    yield (
        "So the rollouts are equal, and the trainer computed other numbers for them: other weights, "
        "kernels or micro-batches."
    )
    if logs.resumed:
        yield "The sampler's numbers are equal, so the trainer's dropout or precision comes before weights."


def _values(logs: Logs, first: LogDifference) -> Iterator[str]:
    if "reward" in first.words:
        yield "So the rollouts are equal, and the reward is not a function of them."


_RULES: dict[str, Callable[[Logs, LogDifference], Iterator[str]]] = {
    "prompts": _loader,
    "count": lambda logs, first: iter(()),
    "numbers": _weights,
    "draws": _draws,
    "texts": _texts,
    "trainer": _trainer,
    "values": _values,
}
