"""What ranks tell each other of completions and scores, as tensors.

Every rank is a witness of the whole step: it compares, hashes and weighs all drawn tokens (train/step.py),
and the ranks compare their hashes. So every rank gets the tokens and logprobs of all, 8 bytes for a token.
Prompts do not travel: every rank has the requests.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ..rollout.types import Completion

_FINISHES = ("stop", "length")


def pack_completions(completions: Sequence[Completion]) -> list[torch.Tensor]:
    """Completions as tensors: ids [C] int32, logprobs [C] fp32, and of each completion [n, 3] int64.

    These three are its length, its finish and its version.
    """
    rows = [(len(c.ids), _FINISHES.index(c.finish), c.weight_version) for c in completions]
    ids = np.fromiter((i for c in completions for i in c.ids), np.int32, sum(len(c.ids) for c in completions))
    parts = [torch.from_numpy(ids), *pack_scores([c.logprobs for c in completions])[:1]]
    return [*parts, torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)]


def unpack_completions(tensors: Sequence[torch.Tensor]) -> list[Completion]:
    """The completions that pack_completions was given."""
    ids, logprobs, rows = tensors
    lengths = rows[:, 0]
    parts = zip(ids.split(lengths.tolist()), unpack_scores((logprobs, lengths)), rows.tolist(), strict=True)
    return [
        Completion(tuple(ids.tolist()), logp, _FINISHES[finish], version)
        for ids, logp, (_, finish, version) in parts
    ]


def pack_scores(scores: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Logprobs of several sequences as tensors: all in one [C] fp32, and their lengths [n] int64."""
    together = np.concatenate([np.empty(0, np.float32), *scores])
    return [torch.from_numpy(together), torch.tensor([len(x) for x in scores], dtype=torch.int64)]


def unpack_scores(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """The scores that pack_scores was given."""
    together, lengths = tensors
    return [x.numpy() for x in together.split(lengths.tolist())]
