"""Our draw as a vLLM logits processor.

It draws each token with zerokl's key of the request, and computes its logprob with zerokl's functions.

vLLM's sampler draws with a generator for each request, which no other engine can repeat. So for vLLM every
request is greedy. This processor draws the token of the key (seed, step, prompt, sample, position). It leaves
one finite number in the row of logits: that token's log-probability, at the token. vLLM's sampler picks the
token, and returns that number, because logprobs_mode is "processed_logits".

Shapes: n rows, one for each request that draws a token; V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import vllm
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from ....kernels.draw import draw_tokens
from ....kernels.logprob import chunk_rows
from ....kernels.philox import Stream
from ....kernels.sampling_params import PENALTIES, SamplingParams, refuse_penalties
from ....kernels.truncation import logit_offset
from ....kernels.upload import upload
from ..types import Request, RngKey, Uniforms, logit_noise
from .experts import EXPERTS

EXTRA = "zerokl"  # the key of our arguments in SamplingParams.extra_args
# What vLLM would do to the logits beside our draw.
_FILTERS = ("min_p", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens")


# A run has few kinds of requests, and each draws at every token.
_host_offset = lru_cache(maxsize=8)(logit_offset)


def request_arguments(request: Request, number: int) -> dict[str, Any]:
    """The extra_args of vLLM's SamplingParams for one completion.

    They are plain numbers, because they cross process boundaries. number: of the request among those that
    run, by which its experts are kept where they are asked for.
    """
    key = request.rng_key
    return ({EXPERTS: number} if request.draw_params.experts else {}) | {
        EXTRA: {
            "sampling_params": list(request.draw_params.sampling_params),
            "key": [key.seed, key.step, int(key.stream), key.prompt, key.sample],
            "drawn": request.drawn,
            "logit_noise": request.draw_params.logit_noise,
            "trajectory_tokens": request.trajectory_tokens,
        }
    }


@dataclass
class Row:
    """A row of the batch. `output` is vLLM's own list of the tokens that the request has so far."""

    sampling_params: SamplingParams
    rng_key: RngKey
    drawn_before: int  # tokens of the trajectory that were drawn before the request
    uniforms: Uniforms
    output: list[int]
    logit_noise: float  # see DrawParams
    ahead: int = 0  # guessed tokens between these and the row (proposer.py)

    @property
    def kind(self) -> tuple[SamplingParams, float, int]:
        """What rows that are drawn together have in common; the last is the seed."""
        return self.sampling_params, self.logit_noise, self.rng_key.seed

    @property
    def drawn(self) -> int:
        """Tokens of the trajectory that stand before the one that the row draws."""
        return self.drawn_before + len(self.output) + self.ahead


def row_of(params: vllm.SamplingParams, output: list[int]) -> Row:
    """The row of a request that was made by `request_arguments`. output: see Row."""
    arguments = params.extra_args[EXTRA]
    seed, step, stream, prompt, sample = arguments["key"]
    rng_key = RngKey(seed, step, Stream(stream), prompt, sample)
    sampling_params = SamplingParams.of(*arguments["sampling_params"])
    uniforms, drawn, noise = Uniforms(rng_key), arguments["drawn"], arguments["logit_noise"]
    return Row(sampling_params, rng_key, drawn, uniforms, output, noise)


class KeyedDraw(LogitsProcessor):
    """Draws every token of every request."""

    @classmethod
    def validate_params(cls, sampling_params: vllm.SamplingParams) -> None:
        """Raise ValueError for a request that was not made by `request_arguments`.

        A filter or a penalty of vLLM's own would change the logits before or after the draw, and the trainer
        would not know of it.
        """
        if EXTRA not in (sampling_params.extra_args or {}):
            raise ValueError(
                "zerokl: this engine draws only for KeyedSampler; the request has no zerokl key in extra_args"
            )
        penalties = {name: getattr(sampling_params, name) for name in PENALTIES}
        refuse_penalties("zerokl: vLLM's SamplingParams", penalties)
        for name in _FILTERS:
            if value := getattr(sampling_params, name):
                raise ValueError(
                    f"zerokl: {name} ({value!r}) of vLLM's SamplingParams: KeyedDraw applies filters itself; "
                    "give it in the sampling_params of the request that KeyedSampler takes"
                )

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        self._rows: dict[int, Row] = {}

    def is_argmax_invariant(self) -> bool:
        """False, so that vLLM applies it to greedy requests too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests to the rows they have in the next forward."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, output in batch_update.added:
            self._rows[index] = row_of(params, output)
        for a, b, direction in batch_update.moved:
            first, second = self._rows.pop(a, None), self._rows.pop(b, None)
            if first is not None:
                self._rows[b] = first
            if second is not None and direction == MoveDirectionality.SWAP:
                self._rows[a] = second

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [n, V] fp32, changed in place."""
        return draw_rows(logits, [self._rows[row] for row in range(logits.shape[0])])


def draw_rows(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Draw from each row of logits [n, V] fp32, and leave one finite number in it (see above), in place."""
    rows_of: dict[tuple[SamplingParams, float, int], list[int]] = {}
    for i, row in enumerate(rows):
        rows_of.setdefault(row.kind, []).append(i)
    size = chunk_rows(logits.shape[1], logits.device)
    for places in rows_of.values():
        for start in range(0, len(places), size):
            part = places[start : start + size]
            _draw(logits, part, [rows[i] for i in part])
    return logits


def _draw(logits: torch.Tensor, places: list[int], drawing: list[Row]) -> None:
    """Draw for the rows `drawing`, which are of one kind, at ascending places of logits [n, V].

    Nothing waits for the device. The logp of a row whose logits are no distribution is NaN, which
    KeyedSampler refuses.
    """
    sampling_params, *_ = drawing[0].kind
    u = torch.tensor([r.uniforms.at(r.drawn) for r in drawing], dtype=torch.float64)
    offset = _host_offset(sampling_params, logits.shape[1], u.device)
    noise = _noise(drawing, logits.shape[1])
    given = [x for x in (noise, offset) if x is not None]
    u, index, *given = upload(logits.device, u, torch.tensor(places), *given)
    offset = None if offset is None else given.pop()
    noise = None if noise is None else given.pop()
    if len(places) == logits.shape[0]:  # the usual case, which needs no copy
        _leave_only(logits, *draw_tokens(logits, u, sampling_params, noise, offset))
        return
    part = logits[index]
    _leave_only(part, *draw_tokens(part, u, sampling_params, noise, offset))
    logits.index_copy_(0, index, part)


def _noise(rows: list[Row], V: int) -> torch.Tensor | None:
    """The noise on the logits [n, V] of rows of one kind; None where they have none."""
    _, scale, seed = rows[0].kind
    if not scale:
        return None
    counters = [(r.drawn, r.rng_key.sample, r.rng_key.prompt, r.rng_key.step) for r in rows]
    return logit_noise(seed, np.array(counters), V) * scale


def _leave_only(logits: torch.Tensor, ids: torch.Tensor, logp: torch.Tensor) -> None:
    """Let logp [n] at ids [n] be the only finite number of each row of logits [n, V]."""
    logits.fill_(float("-inf")).scatter_(1, ids.unsqueeze(1), logp.to(logits.dtype).unsqueeze(1))
