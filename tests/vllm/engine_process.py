"""One vLLM engine in a process of its own: it reads a JSON request, and prints the rollouts as JSON.

Not a test: a script of test_exact.py. vLLM keeps state in its process, so every engine of the tests gets a
fresh process.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
from zerokl.engine.config.vllm_section import VllmConfig
from zerokl.engine.processes.shared_tensor import SharedTensor
from zerokl.engine.rollout.types import GenerationParams, RngKey, complete
from zerokl.engine.rollout.vllm.sampler import VllmZeroklSampler
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import load_decoder
from zerokl.model.decoder import Decoder

sys.path.append(str(Path(__file__).parents[1]))
from trajectories import in_three_turns


class ForgetsToReset(VllmZeroklSampler):
    """The mistake of keeping keys and values of older weights."""

    def sync_weights(self, version):
        reset, self.llm.reset_prefix_cache = self.llm.reset_prefix_cache, lambda: True
        super().sync_weights(version)
        self.llm.reset_prefix_cache = reset


def plant_silu() -> None:
    """Put torch's silu into the decoder. It rounds differently in the tail of a vector and in its body."""
    import zerokl.model.blocks.mlp as mlp

    def silu_mul(gu: torch.Tensor) -> torch.Tensor:
        half = gu.shape[1] // 2
        return torch.nn.functional.silu(gu[:, :half]) * gu[:, half:]

    mlp.silu_mul = silu_mul


def plant_ties() -> None:
    """Let the expert with the higher index win a tie."""
    import zerokl.model.blocks.experts as experts

    lower_wins = experts.topk_softmax

    def higher_wins(logits: torch.Tensor, k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        q, ids = lower_wins(logits.flip(1), k, renormalise)
        return q, logits.shape[1] - 1 - ids

    experts.topk_softmax = higher_wins


PLANTS = {"silu": plant_silu, "ties": plant_ties}


def answer(sampler: VllmZeroklSampler, decoder: Decoder, prompts: list[list[int]], call: dict) -> list[list]:
    """The rollouts of a call: ids, bits of the logprobs, finish reason and version of the weights.

    Where they are asked for, the experts too.
    """
    for _ in range(call.get("updates", 0)):
        decoder.flat.mul_(1.01)
        sampler.sync_weights(sampler.version + 1)
        few_tokens = GenerationParams(SamplingParams(), 1, 4, frozenset())
        complete(sampler, prompts[:2], few_tokens, RngKey(9, sampler.version))
    generation_params = GenerationParams(
        SamplingParams.of(*call["sampling_params"]),
        call["num_generations"],
        call["max_tokens"],
        frozenset(call["stop_ids"]),
        experts=call.get("experts", False),
    )
    draw = complete
    if turns := call.get("turns"):
        draw = partial(in_three_turns, at_any_time=turns == "at any time")
    rollouts = draw(sampler, prompts, generation_params, RngKey(*call["key"]))
    return [
        [r.drawn_ids, r.logprobs.view("int32").tolist(), r.finish, r.weight_version]
        + ([] if r.experts is None else [r.experts.tolist()])
        for r in rollouts
    ]


def main() -> None:
    request = json.load(sys.stdin)
    if request.get("plant") in PLANTS:
        PLANTS[request["plant"]]()
    decoder = load_decoder(Path(request["model"]), getattr(torch, request["dtype"]))
    weights = SharedTensor(decoder.layout.numel, decoder.dtype)
    decoder.move_to(weights.tensor)
    sampler_class = ForgetsToReset if request.get("plant") == "stale" else VllmZeroklSampler
    sampler = sampler_class(Path(request["model"]), decoder.config, weights, VllmConfig(**request["vllm"]))
    drawn, metrics = [], []
    for call in request["calls"]:
        drawn.append(answer(sampler, decoder, request["prompts"], call))
        if request.get("metrics"):
            metrics.append({m.name: m.value for m in sampler.llm.get_metrics() if hasattr(m, "value")})
    report = {"drawn": drawn, "metrics": metrics}
    print("REPORT", json.dumps(report), flush=True)
    sampler.close()
    os._exit(0)  # vLLM's threads would keep the process for seconds


if __name__ == "__main__":
    main()
