"""The engines an audit compares, and our own. Each draws, scores and traces; a log-probability is that of the
distribution drawn from.

Shapes: C completion tokens, T tokens of one sequence, V vocabulary.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from ...kernels.logprob import linear_logprob
from ...kernels.matmul import matmul
from ...kernels.sampling_params import SamplingParams
from ...model.checkpoint import load_decoder
from ...model.decoder import Decoder, Hook, Numerics, PackedContext
from ...model.op_names import in_order, split_fused
from ...model.scoring import cached_scores, logprobs, pack
from ...verify.trace import Trace
from .native import NativeSampler
from .types import GenerationParams, RngKey, Rollout

Pair = tuple[Sequence[int], Sequence[int]]  # prompt and completion

# Sequences of one forward when an engine scores many together.
TOGETHER = 16


class Engine(Protocol):
    """What an audit asks of an engine."""

    name: str
    traced_outside: bool  # a trace is of a forward outside of the process that draws

    def generate(
        self, prompts: Sequence[Sequence[int]], generation_params: GenerationParams, seed: int
    ) -> list[Rollout]:
        """One completion of each prompt, with its tokens' logprobs."""
        ...

    def score(
        self, pairs: Sequence[Pair], sampling_params: SamplingParams, together: bool = True
    ) -> list[np.ndarray]:
        """logprobs [C] fp32 of each completion, from forwards over several sequences or over one each."""
        ...

    def decode(self, pairs: Sequence[Pair], sampling_params: SamplingParams) -> list[np.ndarray] | None:
        """The same, token by token through the engine's cache; None where the engine offers no way."""
        ...

    def trace(self, pair: Pair, sampling_params: SamplingParams) -> Trace:
        """The output of every operation of the forward over one sequence (names.py)."""
        ...

    def drop_caches(self) -> bool:
        """Forget keys and values kept from one call to the next; False where none are."""
        ...


class ZeroklEngine:
    """Our decoder, in one dtype, its logits in `head` where that is another."""

    traced_outside = False

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        head: torch.dtype | None = None,
        device: torch.device | None = None,
        name: str = "zerokl",
    ):
        self.decoder, self.name = load_decoder(folder, dtype, device), name
        self.decoder.numerics = Numerics(lm_head=head)

    def generate(
        self, prompts: Sequence[Sequence[int]], generation_params: GenerationParams, seed: int
    ) -> list[Rollout]:
        """See Engine."""
        return NativeSampler(self.decoder).generate(prompts, generation_params, RngKey(seed, 0))

    @torch.no_grad()
    def score(
        self, pairs: Sequence[Pair], sampling_params: SamplingParams, together: bool = True
    ) -> list[np.ndarray]:
        """See Engine."""
        done, size = [], TOGETHER if together else 1
        for a in range(0, len(pairs), size):
            batch = pack(pairs[a : a + size])
            logp, _ = logprobs(self.decoder, batch, sampling_params)
            done += [x.numpy() for x in logp.cpu().split(batch.completion_lengths)]
        return done

    def decode(self, pairs: Sequence[Pair], sampling_params: SamplingParams) -> list[np.ndarray]:
        """See Engine."""
        return [
            x.numpy()
            for x in cached_scores(self.decoder, [(list(p), list(c)) for p, c in pairs], sampling_params, 1)
        ]

    @torch.no_grad()
    def trace(self, pair: Pair, sampling_params: SamplingParams) -> Trace:
        """See Engine."""
        return trace_decoder(self.decoder, pair, sampling_params)

    def drop_caches(self) -> bool:
        """See Engine."""
        return False


Forward = Callable[[torch.Tensor, Hook], torch.Tensor]


def trace_decoder(
    decoder: Decoder, pair: Pair, sampling_params: SamplingParams, forward: Forward | None = None
) -> Trace:
    """The trace of our decoder; projections that it fuses are split.

    forward: how ids [T] become hidden states [T, D] where that is not this process's own forward over the
    whole sequence.
    """
    batch, c, found = pack([pair]), decoder.config, {}

    def hook(name: str, x: torch.Tensor) -> None:
        for op, part in split_fused(name, x, c).items():
            rows = part.to("cpu", copy=True)
            found[op] = (
                torch.cat([found[op], rows]) if op in found else rows
            )  # a forward may take several passes

    head = decoder.logits_weight()
    hidden = (
        forward(batch.ids, hook)
        if forward
        else decoder.hidden(batch.ids, PackedContext(batch.lengths, c), hook)
    )
    hidden = hidden.to(head.dtype)
    hook("logits", matmul(hidden, head))
    rows, targets = batch.rows.to(decoder.device), batch.targets.to(decoder.device)
    hook("logprob", linear_logprob(hidden[rows], head, targets, sampling_params)[0])
    return in_order(found, c.layers)
