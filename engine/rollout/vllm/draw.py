"""Our draw as a vLLM logits processor: the token of the request's own key, and its logprob, from zerokl's own
distribution.

vLLM's sampler draws with a generator for each request, which no other engine can repeat. So the requests are
greedy for vLLM, and this processor leaves one finite number in each row of logits: at the token that (seed,
step, prompt, sample, position) draws, its log-probability. vLLM's sampler picks that token, and with
logprobs_mode = "processed_logits" returns that very number.
"""

from dataclasses import dataclass
from typing import Any

import torch
import vllm
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from ....kernels.logprob import chunk_rows, drawn_logprobs, scaled_logits
from ....kernels.philox import Stream
from ....kernels.sampling_params import SamplingParams
from ..types import RngKey, Uniforms

EXTRA = "zerokl"  # the key of our arguments in SamplingParams.extra_args


def request_arguments(
    sampling_params: SamplingParams, keys: RngKey, prompt: int, sample: int
) -> dict[str, Any]:
    """SamplingParams.extra_args of one completion; plain numbers, as they cross process boundaries."""
    key = [keys.seed, keys.step, int(keys.stream), prompt, sample]
    return {EXTRA: {"distribution": list(sampling_params), "key": key}}


@dataclass
class _Request:
    """A row of the batch. `output` is vLLM's own list of the request's tokens so far."""

    sampling_params: SamplingParams
    prompt: int
    sample: int
    uniforms: Uniforms
    output: list[int]


class KeyedDraw(LogitsProcessor):
    """Draws every token of every request. Raises FloatingPointError for logits that are no distribution."""

    @classmethod
    def validate_params(cls, sampling_params: vllm.SamplingParams) -> None:
        """Raise ValueError for a request that was not made by `request_arguments`."""
        if EXTRA not in (sampling_params.extra_args or {}):
            raise ValueError(
                "zerokl: this engine draws only for VllmSampler; the request has no zerokl key in extra_args"
            )

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        self._rows: dict[int, _Request] = {}

    def is_argmax_invariant(self) -> bool:
        """False, so that greedy requests pass through it."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests to the rows they have in the next forward."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, output in batch_update.added:
            given = params.extra_args[EXTRA]
            seed, step, stream, prompt, sample = given["key"]
            uniforms = Uniforms(RngKey(seed, step, Stream(stream)), prompt, sample)
            self._rows[index] = _Request(
                SamplingParams(*given["distribution"]), prompt, sample, uniforms, output
            )
        for a, b, direction in batch_update.moved:
            first, second = self._rows.pop(a, None), self._rows.pop(b, None)
            if first is not None:
                self._rows[b] = first
            if second is not None and direction == MoveDirectionality.SWAP:
                self._rows[a] = second

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [n, V] fp32, changed in place."""
        groups: dict[SamplingParams, list[int]] = {}
        for row in range(logits.shape[0]):
            groups.setdefault(self._rows[row].sampling_params, []).append(row)
        at_once = chunk_rows(logits.shape[1], logits.device)
        for sampling_params, rows in groups.items():
            for a in range(0, len(rows), at_once):
                self._draw(logits, rows[a : a + at_once], sampling_params)
        return logits

    def _draw(self, logits: torch.Tensor, rows: list[int], sampling_params: SamplingParams) -> None:
        every = len(rows) == logits.shape[0]  # rows are in order: the usual case needs no copies
        z = scaled_logits(logits if every else logits[rows], sampling_params)
        requests = [self._rows[row] for row in rows]
        u = torch.tensor(
            [r.uniforms.at(len(r.output)) for r in requests], dtype=torch.float64, device=z.device
        )
        ids, logp = drawn_logprobs(z, u, greedy=sampling_params.temperature == 0.0)
        bad = (~torch.isfinite(logp)).nonzero()
        if len(bad):
            r = requests[int(bad[0])]
            raise FloatingPointError(
                f"sampler: the logits of prompt {r.prompt}, sample {r.sample}, position {len(r.output)} are not finite"
            )
        logits[slice(None) if every else rows] = float("-inf")
        logits[rows, ids] = logp
