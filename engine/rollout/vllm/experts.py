"""The experts that vLLM chooses, by request: an extension of vLLM's worker (worker_extension_cls).

vLLM returns experts itself (enable_return_routed_experts), but only from its second model runner, which has
no logits processors of our kind (draw.py). So this extension binds a capturer of its own to the model, by the
function that vLLM's runner uses (model_executor/layers/fused_moe/routed_experts_capturer.py). It finds the
routers of vLLM's own models, and the sources that our model has (model.py). Nothing of vLLM is patched.

A row belongs to a position of a request, and lies in a slot of the paged cache. The experts of a slot are
kept too: a request that begins with cached blocks has the experts that these blocks were computed with.
Each forward is copied to the host, which waits for it. A CUDA graph calls nobody, so experts need a vLLM
without graphs.

Shapes: T rows of a forward; R rows of a request, which are its tokens but the last; L layers with experts; k
experts of a token.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

EXPERTS = "zerokl_experts"  # in SamplingParams.extra_args: under which number a request's experts are kept
EXTENSION = f"{__name__}.NamesExperts"


class NamesExperts:
    """Methods that vLLM adds to its worker, for LLM.collective_rpc."""

    def zerokl_name_experts(self) -> None:
        """Keep experts from the next forward on. The caller resets the prefix cache."""
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

        self.zerokl_recorder = ExpertRecorder(self.model_runner)
        bind_routed_experts_capturer(self.model_runner.get_model(), self.zerokl_recorder)

    def zerokl_take_experts(self, numbers: Sequence[int]) -> list[tuple[list[int], bytes]]:
        """The shape [R, L, k] and the int16 experts of each of these requests, which are dropped here."""
        taken = [self.zerokl_recorder.take(number) for number in numbers]
        return [(list(experts.shape), experts.tobytes()) for experts in taken]


def experts_of(answer: tuple[Sequence[int], bytes], dtype: torch.dtype) -> np.ndarray:
    """An answer of zerokl_take_experts as an array [R, L, k] in id_dtype (model/routing.py)."""
    shape, data = answer
    return torch.frombuffer(bytearray(data), dtype=torch.int16).view(list(shape)).to(dtype).numpy()


class ExpertRecorder:
    """Capturer of the experts of each row. runner: vLLM's GPUModelRunner, whose batch says what a row is."""

    def __init__(self, runner: Any):
        self._runner = runner
        self._forward: dict[int, torch.Tensor] = {}  # by layer, [T, k] of the forward that runs
        self._plan: list[tuple[int | None, slice, np.ndarray]] = []
        self._of_slot: np.ndarray | None = None  # [slots, L, k] int16, -1 where nothing is known
        self._of_request: dict[int, list[tuple[int, np.ndarray]]] = {}  # first position, and experts

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """The experts [T, k] that a layer's rows take. vLLM calls it inside the forward."""
        if layer_id in self._forward:
            self._finish()
        if not self._forward:
            self._plan = self._rows_of_requests()
        self._forward[layer_id] = topk_ids.to(torch.int16, copy=True)

    def take(self, number: int) -> np.ndarray:
        """The experts [R, L, k] of a request that has ended. They are dropped here.

        Where tokens were guessed, rows of refused guesses may follow the request's own.
        """
        if self._forward:
            self._finish()
        parts = self._of_request.pop(number)
        rows, (L, k) = max(start + len(part) for start, part in parts), parts[0][1].shape[1:]
        experts = np.full((rows, L, k), -1, np.int16)
        # A request that was preempted is computed again. Its tokens were drawn with the first experts. Where
        # tokens are guessed, a place is also computed again with the token that was drawn there; there it is
        # our decoder, which names the same experts again after a preemption.
        for start, part in parts if self._runner.speculative_config else reversed(parts):
            experts[start : start + len(part)] = part
        assert experts.min() >= 0, "a row was neither computed nor cached since experts are kept"
        return experts

    def _rows_of_requests(self) -> list[tuple[int | None, slice, np.ndarray]]:
        """Of each request of the forward its number, its rows, and the slots of all its positions so far."""
        batch, plan = self._runner.input_batch, []
        table = batch.block_table[0]
        starts = self._runner.query_start_loc.np
        for i, request_id in enumerate(batch.req_ids):
            first, rows = int(batch.num_computed_tokens_cpu[i]), slice(int(starts[i]), int(starts[i + 1]))
            positions = np.arange(first + rows.stop - rows.start)
            blocks = table.block_table.np[i, positions // table.block_size].astype(np.int64)
            slots = blocks * table.block_size + positions % table.block_size
            params = self._runner.requests[request_id].sampling_params
            plan.append(((params.extra_args or {}).get(EXPERTS), rows, slots))
        return plan

    def _finish(self) -> None:
        """Give the rows of the forward to their slots and requests."""
        layers = [self._forward[layer] for layer in sorted(self._forward)]
        experts, self._forward = torch.stack(layers, dim=1).cpu().numpy(), {}
        if self._of_slot is None:
            cache = self._runner.kv_cache_config
            slots = cache.num_blocks * cache.kv_cache_groups[0].kv_cache_spec.block_size
            self._of_slot = np.full((slots, *experts.shape[1:]), -1, np.int16)
        for _, rows, slots in self._plan:
            self._of_slot[slots[len(slots) - (rows.stop - rows.start) :]] = experts[rows]
        for number, rows, slots in self._plan:
            first = len(slots) - (rows.stop - rows.start)
            if number is not None:
                # A request begins after what is cached: also what another one computes in this forward.
                parts = self._of_request.setdefault(number, [(0, self._of_slot[slots[:first]])])
                parts.append((first, experts[rows].copy()))
