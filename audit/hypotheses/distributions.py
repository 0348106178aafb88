"""Hypotheses about the distribution: the logged numbers are of another one than the log says."""

from collections.abc import Callable, Iterator
from functools import partial

from ...files.reading import read_json
from ...kernels.sampling_params import SamplingParams
from .evidence import Evidence
from .prediction import Prediction
from .scorer import hidden_rows, read_rows

# Temperatures and cuts that are tried where the log's own do not fit.
TEMPERATURES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 2.0)
TOP_P = (0.7, 0.8, 0.9, 0.95, 0.99)
TOP_K = (10, 20, 40, 50, 100)
MIN_P = (0.01, 0.02, 0.05, 0.1)

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


def another_temperature(evidence: Evidence) -> Iterator[Prediction]:
    """Another temperature than the log says."""
    changes = [
        (f"the sampler's temperature was {t:g}", partial(_temperature, temperature=t)) for t in TEMPERATURES
    ]
    yield from _others(evidence, changes)


def another_cut(evidence: Evidence) -> Iterator[Prediction]:
    """Another top-p, top-k or min-p than the log says."""
    changes = [(f"the sampler drew with top-p {p:g}", partial(_top_p, top_p=p)) for p in TOP_P]
    changes += [(f"the sampler drew with top-k {k}", partial(_top_k, top_k=k)) for k in TOP_K]
    changes += [(f"the sampler drew with min-p {p:g}", partial(_min_p, min_p=p)) for p in MIN_P]
    yield from _others(evidence, changes)


def generation_config(evidence: Evidence) -> Iterator[Prediction]:
    """The defaults of the checkpoint's generation_config.json, which vLLM and transformers obey."""
    path = evidence.scorer.folder / "generation_config.json"
    values = read_json(path) if path.exists() else {}
    known = {"temperature": (int, float), "top_k": (int,), "top_p": (int, float), "min_p": (int, float)}
    given = {name: values[name] for name, types in known.items() if type(values.get(name)) in types}
    if not given:
        return
    said = ", ".join(f"{name} {value:g}" for name, value in given.items())
    what = f"the sampler took {said} from the checkpoint's generation_config.json"
    yield from _others(evidence, [(what, lambda p: p._replace(**given))])


def _temperature(params: SamplingParams, temperature: float) -> SamplingParams:
    return params._replace(temperature=temperature)


def _square(params: SamplingParams) -> SamplingParams:
    return params._replace(temperature=params.temperature**2)


def _top_p(params: SamplingParams, top_p: float) -> SamplingParams:
    return params._replace(top_p=top_p)


def _min_p(params: SamplingParams, min_p: float) -> SamplingParams:
    return params._replace(min_p=min_p)


def _top_k(params: SamplingParams, top_k: int) -> SamplingParams:
    return params._replace(top_k=top_k)
