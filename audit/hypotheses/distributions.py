"""Hypotheses about the distribution: the logged numbers are of another one than the log says."""

from collections.abc import Callable, Iterator

from ...kernels.sampling_params import SamplingParams
from .evidence import Evidence
from .prediction import Prediction
from .scorer import hidden_rows, read_rows

Change = Callable[[SamplingParams], SamplingParams]


def _others(evidence: Evidence, changes: list[tuple[str, Change]]) -> Iterator[Prediction]:
    """The scores of the same rows under changed parameters; a change that changes nothing is left out."""
    scorer, pairs, params = evidence.scorer, evidence.pairs(), evidence.params()
    decoder, rows = scorer.model(), None
    for what, change in changes:
        changed = [change(p) for p in params]
        if changed == params:
            continue
        if rows is None:
            rows = hidden_rows(decoder, pairs)
        yield Prediction(what, evidence.by_line(read_rows(decoder, rows, pairs, changed)))


def raw_logits(evidence: Evidence) -> Iterator[Prediction]:
    """Log-softmax of the logits as the model gives them."""
    what = "the logged log-probabilities are of the raw logits: temperature 1, nothing cut"
    yield from _others(evidence, [(what, lambda p: SamplingParams())])


def without_temperature(evidence: Evidence) -> Iterator[Prediction]:
    """The cut is applied, the temperature is not."""
    if any(p.cuts for p in evidence.params()):
        what = "the temperature is not in the logged log-probabilities, the cut is"
        yield from _others(evidence, [(what, lambda p: p._replace(temperature=1.0))])


def not_renormalised(evidence: Evidence) -> Iterator[Prediction]:
    """The temperature is applied; probabilities are over the whole vocabulary, not over the kept set."""
    what = "the logged log-probabilities are over the whole vocabulary, not over the tokens that were kept"
    yield from _others(evidence, [(what, lambda p: p.uncut)])


def temperature_otherwise(evidence: Evidence) -> Iterator[Prediction]:
    """The temperature twice, or multiplied in place of divided."""
    words = "the logits were {} by the temperature"
    changes = [
        (words.format("divided twice"), _square),
        (words.format("multiplied, not divided,"), lambda p: _temperature(p, 1.0 / (p.temperature or 1.0))),
    ]
    yield from _others(evidence, changes)


def _temperature(params: SamplingParams, temperature: float) -> SamplingParams:
    return params._replace(temperature=temperature)


def _square(params: SamplingParams) -> SamplingParams:
    return params._replace(temperature=params.temperature**2)
