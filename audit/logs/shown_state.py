"""What two equal logs show of a resume, and what they do not. A state shows once a step has used it."""

from collections.abc import Iterator

from .metric_rows import GRADIENT_NORM, LEARNING_RATE, LOSS_SCALE, number
from .resume_causes import Logs


def shown(logs: Logs) -> Iterator[str]:
    """A line for each state of a training loop, of two logs without a difference."""
    steps = [logs.b.steps[s] for s in logs.common if s in logs.a.steps and s in logs.b.steps]
    digests = [d for step in steps for d in step.rollouts]
    scored = [d for d in digests if d.logprobs or d.trainer_logprobs]
    tokens = sum(d.tokens for d in scored)
    yield _line(
        "weights", scored and f"log-probabilities of {tokens:,} tokens", "no log-probability was logged"
    )
    yield _line(
        "optimizer", _optimizer(logs, bool(scored)), "no weights or gradient after an update were logged"
    )
    prompts = sum(d.prompt is not None for d in digests)
    yield _line("data loader", prompts and f"prompts of {prompts:,} completions", "no prompt was logged")
    drawn = [d for d in digests if d.completion is not None]
    certain = bool(scored) and not any(d.surprise for d in scored)
    nothing_drawn = "each token had probability 1" if certain else "no completion was logged"
    words = not certain and drawn and f"{len(drawn):,} completions"
    yield _line("sampler's generator", words, nothing_drawn)
    yield _line("learning rate's schedule", *_schedule(logs))
    if names := logs.names(LOSS_SCALE):
        yield _line("loss scaler", f"{names[0]} of {_count(logs, names[0])} steps", "")
    yield (
        "Not shown: what no common step used, such as the next epoch's order, and an evaluation's "
        "generator. Logs are not signed: whoever wrote them could have written others."
    )


def _line(state: str, how: object, why_not: str) -> str:
    return f"{state}: equal, shown by {how}" if how else f"{state}: not shown, {why_not}"


def _count(logs: Logs, name: str) -> int:
    return sum(name in row for step in logs.common for row in logs.rows(step)[:1])


def _optimizer(logs: Logs, scored: bool) -> str:
    """An update shows in the numbers of a later step."""
    later = [
        step
        for step in logs.common[1:]
        if (scored and step in logs.b.steps)
        or any(GRADIENT_NORM.search(n) or n.endswith("loss") for n in logs.rows(step)[0])
    ]
    return f"the numbers of {len(later)} steps after an update" if later else ""


def _schedule(logs: Logs) -> tuple[str, str]:
    names = logs.names(LEARNING_RATE)
    if not names:
        return "", "no learning rate was logged"
    rates = {number(logs.rows(step)[1].get(names[0])) for step in logs.common} - {None}
    if len(rates) < 2:
        return "", "it is constant in the common steps"
    return f"{names[0]} of {_count(logs, names[0])} steps, {min(rates):.3g} to {max(rates):.3g}", ""
