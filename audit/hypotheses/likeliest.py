"""Wrong numbers at some places that only a model knows: of another token, or of another distribution there.

    the likeliest token's     max over v of logp(v), in place of the drawn token's
    of the raw logits         log_softmax(z)[token], without the temperature and the filters

Shapes: C completion tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from ...kernels.sampling_params import SamplingParams
from ...kernels.truncation import scaled_logits
from . import places
from .evidence import Evidence
from .lines import Line
from .places import Number
from .prediction import Prediction
from .settings_search import Rows, rows_of

Numbers = Callable[[Line, torch.Tensor], np.ndarray]


def wrong_numbers(evidence: Evidence) -> Iterator[Prediction]:
    """Those of places.py, and then those that need the model."""
    yield from places.wrong_numbers(evidence)
    if places.has_odd_tokens(evidence):
        yield from places.wrong_numbers(evidence, _numbers(rows_of(evidence)))


def _numbers(rows: Rows) -> Iterator[Number]:
    lines = rows.evidence.lines

    def known(i: int, of: Numbers) -> np.ndarray:
        return of(lines[i], rows.logits[i]) if i in rows.logits else np.full(len(lines[i].scored), np.nan)

    yield "the likeliest token's", lambda i: known(i, _likeliest)
    if any(p != SamplingParams() for p in rows.evidence.params()):
        yield "of the raw logits", lambda i: known(i, _raw)


def _likeliest(line: Line, z: torch.Tensor) -> np.ndarray:
    """The largest log-probability of each place, [C]. z [C, V]."""
    return torch.log_softmax(scaled_logits(z, line.params or SamplingParams()), 1).amax(1).numpy()


def _raw(line: Line, z: torch.Tensor) -> np.ndarray:
    """The drawn tokens' log-probabilities without the sampling parameters, [C]. z [C, V]."""
    ids = torch.tensor(line.completion_ids).unsqueeze(1)
    return torch.log_softmax(z, 1).gather(1, ids).squeeze(1).numpy()
