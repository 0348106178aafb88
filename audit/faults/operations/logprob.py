"""The log-probability of the drawn tokens."""

from __future__ import annotations

from collections.abc import Iterator

from ....kernels.sampling_params import SamplingParams
from ....model.operation import Equation
from ..changed_operation import Change, ChangedOperation, Traced


def changes(traced: Traced) -> Iterator[Change]:
    """A part of the distribution that is left out."""
    exact, (logits,) = traced.exact, traced.inputs
    params = exact.sampling_params
    changes = {
        "of the raw logits: no temperature and no filter is applied": SamplingParams(),
        "without the temperature": params._replace(temperature=1.0),
        "not renormalised after the cut": params.uncut,
    }
    for words, other in changes.items():
        if other != params:
            yield f"it is the log-probability {words}", exact.logprob(logits, other)


CHANGED = ChangedOperation(equations=(Equation.LOGPROB,), changes=changes)
