"""What ranks tell each other of completions and scores, as tensors.

Every rank is a witness of the whole step: it compares, hashes and weighs all drawn tokens (train/step.py),
and the ranks compare their hashes. So every rank gets the tokens and logprobs of all, 8 bytes for a token.
Prompts do not travel: every rank has the requests.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ...rollout.types import Completion

_FINISHES = ("stop", "length")


def pack_completions(completions: Sequence[Completion]) -> list[torch.Tensor]:
    """Completions as tensors: ids [C] int32, the logprobs (pack_scores), and of each [n, 2] int64.

    These two are its finish and its version. Where completions name their experts, these follow, [R, L, k] of
    all together, and the rows of each, [n] int64.
    """
    ids = torch.tensor([i for c in completions for i in c.ids], dtype=torch.int32)
    ends = [(_FINISHES.index(c.finish), c.weight_version) for c in completions]
    scores = pack_scores([c.logprobs for c in completions])
    experts = [torch.from_numpy(c.experts) for c in completions if c.experts is not None]
    rows = torch.tensor([len(x) for x in experts], dtype=torch.int64)
    packed = [ids, *scores, torch.tensor(ends, dtype=torch.int64).reshape(-1, 2)]
    return [*packed, torch.cat(experts), rows] if experts else packed


def unpack_completions(tensors: Sequence[torch.Tensor]) -> list[Completion]:
    """The completions that pack_completions was given."""
    ids, together, counts, ends, *experts = tensors
    logprobs = unpack_scores([together, counts])
    lengths = counts.tolist()
    by_completion = [None] * len(lengths)
    if experts:
        all_experts, rows = experts
        by_completion = [x.numpy() for x in all_experts.split(rows.tolist())]
    parts = zip(ids.split(lengths), logprobs, ends.tolist(), by_completion, strict=True)
    return [
        Completion(tuple(own_ids.tolist()), logp, _FINISHES[finish], version, own_experts)
        for own_ids, logp, (finish, version), own_experts in parts
    ]


def pack_scores(scores: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Logprobs of several sequences as tensors: all in one [C] fp32, and their lengths [n] int64."""
    together = np.concatenate([np.empty(0, np.float32), *scores])
    return [torch.from_numpy(together), torch.tensor([len(x) for x in scores], dtype=torch.int64)]


def unpack_scores(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """The scores that pack_scores was given."""
    together, lengths = tensors
    return [x.numpy() for x in together.split(lengths.tolist())]
