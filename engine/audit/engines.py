"""The engines an audit compares, and our own. Each draws, scores and traces; a log-probability is that of the distribution drawn from.

Shapes: C completion tokens, T tokens of one sequence, V vocabulary.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from ...kernels.logprob import Distribution, linear_logprob
from ...kernels.order import matmul_rows
from ...model.checkpoint import load_decoder
from ...model.config import ModelConfig
from ...model.decoder import Decoder, Numerics, PackedContext, Tap
from ...model.scoring import logprobs, pack
from ...verify.trace import Trace
from ..law import cached_scores
from ..native import NativeSampler
from ..rollout import Keys, Rollout, Sampling
from .names import in_order

Pair = tuple[Sequence[int], Sequence[int]]  # prompt and completion

# Sequences of one forward when an engine scores many together.
TOGETHER = 16


class Engine(Protocol):
    """What an audit asks of an engine."""

    name: str
    traced_outside: bool  # a trace is of a forward outside of the process that draws

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[Rollout]:
        """One completion of each prompt, with its tokens' logprobs."""
        ...

    def score(self, pairs: Sequence[Pair], dist: Distribution, together: bool = True) -> list[np.ndarray]:
        """logprobs [C] fp32 of each completion, from forwards over several sequences or over one each."""
        ...

    def decode(self, pairs: Sequence[Pair], dist: Distribution) -> list[np.ndarray] | None:
        """The same, token by token through the engine's cache; None where the engine offers no way."""
        ...

    def trace(self, pair: Pair, dist: Distribution) -> Trace:
        """The output of every operation of the forward over one sequence (names.py)."""
        ...

    def drop_caches(self) -> bool:
        """Forget keys and values kept from one call to the next; False where none are."""
        ...


class ZeroklEngine:
    """Our decoder, in one dtype, its logits in `head` where that is another."""

    traced_outside = False

    def __init__(
        self, folder: Path, dtype: torch.dtype, head: torch.dtype | None = None, device: torch.device | None = None, name: str = "zerokl"
    ):
        self.decoder, self.name = load_decoder(folder, dtype, device), name
        self.decoder.numerics = Numerics(head=head)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[Rollout]:
        """See Engine."""
        return NativeSampler(self.decoder).generate(prompts, sampling, Keys(seed, 0))

    @torch.no_grad()
    def score(self, pairs: Sequence[Pair], dist: Distribution, together: bool = True) -> list[np.ndarray]:
        """See Engine."""
        done, size = [], TOGETHER if together else 1
        for a in range(0, len(pairs), size):
            batch = pack(pairs[a : a + size])
            logp, _ = logprobs(self.decoder, batch, dist)
            done += [x.numpy() for x in logp.cpu().split(batch.completion_lengths)]
        return done

    def decode(self, pairs: Sequence[Pair], dist: Distribution) -> list[np.ndarray]:
        """See Engine."""
        return [x.numpy() for x in cached_scores(self.decoder, [(list(p), list(c)) for p, c in pairs], dist, 1)]

    @torch.no_grad()
    def trace(self, pair: Pair, dist: Distribution) -> Trace:
        """See Engine."""
        return trace_decoder(self.decoder, pair, dist)

    def drop_caches(self) -> bool:
        """See Engine."""
        return False


Forward = Callable[[torch.Tensor, Tap], torch.Tensor]


def trace_decoder(decoder: Decoder, pair: Pair, dist: Distribution, forward: Forward | None = None) -> Trace:
    """The trace of our decoder; projections that it fuses are split.

    forward: how ids [T] become hidden states [T, D] where that is not this process's own forward over the whole sequence.
    """
    batch, c, found = pack([pair]), decoder.config, {}

    def tap(name: str, x: torch.Tensor) -> None:
        for op, part in split_fused(name, x, c).items():
            rows = part.to("cpu", copy=True)
            found[op] = torch.cat([found[op], rows]) if op in found else rows  # a forward may take several passes

    head = decoder.logits_weight()
    hidden = forward(batch.ids, tap) if forward else decoder.hidden(batch.ids, PackedContext(batch.lengths, c), tap)
    hidden = hidden.to(head.dtype)
    tap("logits", matmul_rows(hidden, head.t()))
    rows, targets = batch.rows.to(decoder.device), batch.targets.to(decoder.device)
    tap("logprob", linear_logprob(hidden[rows], head, targets, dist)[0])
    return in_order(found, c.layers)


def split_fused(name: str, x: torch.Tensor, c: ModelConfig) -> dict[str, torch.Tensor]:
    """The outputs [T, width] of the operations that our decoder computes as one, by the names of names.py; views of x [T, ...]."""
    at, _, op = name.rpartition(".")
    at = f"{at}." if at else ""
    flat = x.reshape(x.shape[0], -1)
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    splits = {
        "qkv": (("q_proj", "k_proj", "v_proj"), (q, kv, kv)), "qk_norm": (("q_norm", "k_norm"), (q, kv)),
        "rope": (("q_rope", "k_rope"), (q, kv)), "gate_up": (("gate_proj", "up_proj"), (flat.shape[1] // 2,) * 2),
    }  # fmt: skip
    names, widths = splits.get(op, ((op,), (flat.shape[1],)))
    return {at + n: part for n, part in zip(names, flat.split(widths, dim=1), strict=True)}
