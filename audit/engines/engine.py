"""The interface of the engines that an audit compares, and our own engine.

An engine draws, scores and traces. A log-probability is the one under the distribution that the token was
drawn from.

Shapes: C completion tokens, T tokens of one sequence.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from ...engine.rollout.native import NativeSampler
from ...engine.rollout.types import GenerationParams, RngKey, Rollout, complete
from ...kernels.logprob import head_logits, linear_logprob, log_distribution
from ...kernels.sampling_params import SamplingParams
from ...kernels.tile_tables import DEFAULT_TABLE, TileTable
from ...kernels.truncation import scaled_logits
from ...model.checkpoint import load_decoder
from ...model.context import Hook, PackedContext
from ...model.decoder import Decoder, Numerics
from ...model.operations import in_order, split_fused
from ...model.scoring import cached_scores, logprobs, pack
from ...verify.operation_outputs import Trace
from .engine_settings import Settings, zerokl_settings

Pair = tuple[Sequence[int], Sequence[int]]  # prompt and completion

# Sequences of one forward, where an engine scores many together.
TOGETHER = 16
# Rows of a chunk of whole distributions, [rows, V].
DISTRIBUTIONS = 64


class Engine(Protocol):
    """What an audit asks of an engine."""

    name: str
    traced_outside: bool  # whether the traced forward runs outside the process that draws

    def generate(
        self, prompts: Sequence[Sequence[int]], generation_params: GenerationParams, seed: int
    ) -> list[Rollout]:
        """One completion of each prompt, with the logprobs of its tokens."""
        ...

    def score(
        self, pairs: Sequence[Pair], sampling_params: SamplingParams, together: bool = True
    ) -> list[np.ndarray]:
        """logprobs [C] fp32 of each completion.

        One forward is over several sequences (`together`) or over one.
        """
        ...

    def decode(self, pairs: Sequence[Pair], sampling_params: SamplingParams) -> list[np.ndarray] | None:
        """As `score`, but token by token through the engine's cache; None where the engine cannot."""
        ...

    def distributions(self, pair: Pair, sampling_params: SamplingParams) -> Iterator[torch.Tensor]:
        """logp of every token of the vocabulary at each place of a completion, on the CPU.

        In chunks of DISTRIBUTIONS places, [rows, V] fp32; -inf for a token that cannot be drawn.
        """
        ...

    def settings(self) -> Settings:
        """What decides this engine's bits beside the checkpoint and the dtypes."""
        ...

    def trace(self, pair: Pair, sampling_params: SamplingParams) -> Trace:
        """The output of every operation of the forward over one sequence (names: model/operations.py)."""
        ...

    def drop_caches(self) -> bool:
        """Forget keys and values that stay from one call to the next; False where none stay."""
        ...


class ZeroklEngine:
    """Our decoder in one dtype; its logits are in `head` where that is given.

    tiles: of its products on a GPU.
    """

    traced_outside = False

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        head: torch.dtype | None = None,
        device: torch.device | None = None,
        name: str = "zerokl",
        tiles: TileTable = DEFAULT_TABLE,
    ):
        numerics = Numerics(lm_head=head, tiles=tiles)
        self.decoder, self.name = load_decoder(folder, dtype, device, numerics), name

    def generate(
        self, prompts: Sequence[Sequence[int]], generation_params: GenerationParams, seed: int
    ) -> list[Rollout]:
        return complete(NativeSampler(self.decoder), prompts, generation_params, RngKey(seed, 0))

    @torch.no_grad()
    def score(
        self, pairs: Sequence[Pair], sampling_params: SamplingParams, together: bool = True
    ) -> list[np.ndarray]:
        scores, size = [], TOGETHER if together else 1
        for start in range(0, len(pairs), size):
            batch = pack(pairs[start : start + size])
            logp, _ = logprobs(self.decoder, batch, sampling_params)
            scores += [x.numpy() for x in logp.cpu().split(batch.drawn_lengths)]
        return scores

    def decode(self, pairs: Sequence[Pair], sampling_params: SamplingParams) -> list[np.ndarray]:
        lists = [(list(prompt), list(completion)) for prompt, completion in pairs]
        return [logp.numpy() for logp in cached_scores(self.decoder, lists, sampling_params, chunk=1)]

    @torch.no_grad()
    def distributions(self, pair: Pair, sampling_params: SamplingParams) -> Iterator[torch.Tensor]:
        batch, decoder, lm_head = pack([pair]), self.decoder, self.decoder.logits_weight()
        hidden = decoder.hidden(batch.ids, PackedContext(batch.lengths, decoder.config))
        for h in hidden[batch.rows.to(decoder.device)].to(lm_head.dtype).split(DISTRIBUTIONS):
            logits = head_logits(h, lm_head, decoder.config.head.cap, tiles=decoder.numerics.tiles)
            yield log_distribution(scaled_logits(logits, sampling_params)).cpu()

    def settings(self) -> Settings:
        return zerokl_settings(self.decoder)

    @torch.no_grad()
    def trace(self, pair: Pair, sampling_params: SamplingParams) -> Trace:
        return trace_decoder(self.decoder, pair, sampling_params)

    def drop_caches(self) -> bool:
        return False


Forward = Callable[[torch.Tensor, Hook], torch.Tensor]


def trace_decoder(
    decoder: Decoder, pair: Pair, sampling_params: SamplingParams, forward: Forward | None = None
) -> Trace:
    """The trace of our decoder. Operations that it computes as one are split.

    forward: turns ids [T] into hidden states [T, D]. Without it, the decoder does, in one forward over the
    whole sequence.
    """
    batch, config, trace = pack([pair]), decoder.config, {}

    def hook(name: str, x: torch.Tensor) -> None:
        for op, part in split_fused(name, x, config).items():
            rows = part.to("cpu", copy=True)
            # A forward may take several passes over parts of the sequence.
            trace[op] = torch.cat([trace[op], rows]) if op in trace else rows

    lm_head = decoder.logits_weight()
    if forward:
        hidden = forward(batch.ids, hook)
    else:
        hidden = decoder.hidden(batch.ids, PackedContext(batch.lengths, config), hook)
    hidden = hidden.to(lm_head.dtype)
    tiles, cap = decoder.numerics.tiles, config.head.cap
    hook("logits", head_logits(hidden, lm_head, cap, tiles=tiles))
    rows, targets = batch.rows.to(decoder.device), batch.targets.to(decoder.device)
    logp, _ = linear_logprob(hidden[rows], lm_head, targets, sampling_params, tiles=tiles, cap=cap)
    hook("logprob", logp)
    return in_order(trace, config.layers, config)
