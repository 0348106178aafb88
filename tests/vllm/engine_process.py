"""One vLLM engine in a process of its own: draws what a JSON request asks for, and prints the rollouts as
JSON.

Not a test. vLLM keeps state of its process, so every engine of the tests gets a fresh one.
"""

import json
import os
import sys
from pathlib import Path

import torch
from zerokl.engine.config import VllmConfig
from zerokl.engine.rollout.types import GenerationParams, RngKey
from zerokl.engine.rollout.vllm.sampler import VllmSampler
from zerokl.engine.shared_tensor import SharedTensor
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import load_decoder


class ForgetsToReset(VllmSampler):
    """The mistake of keeping keys and values of older weights."""

    def sync_weights(self, version):
        reset, self.llm.reset_prefix_cache = self.llm.reset_prefix_cache, lambda: True
        super().sync_weights(version)
        self.llm.reset_prefix_cache = reset


def plant_silu() -> None:
    """torch's own silu, which rounds otherwise in the tail of a vector than in its body."""
    import zerokl.model.decoder as decoder

    decoder.silu_mul = lambda gu: (
        torch.nn.functional.silu(gu[:, : gu.shape[1] // 2]) * gu[:, gu.shape[1] // 2 :]
    )


def main() -> None:
    request = json.load(sys.stdin)
    if request.get("plant") == "silu":
        plant_silu()
    decoder = load_decoder(Path(request["model"]), getattr(torch, request["dtype"]))
    weights = SharedTensor(decoder.layout.numel, decoder.dtype)
    decoder.move_to(weights.tensor)
    kind = ForgetsToReset if request.get("plant") == "stale" else VllmSampler
    sampler = kind(Path(request["model"]), decoder.config, weights, VllmConfig(**request["vllm"]))
    drawn = []
    for call in request["calls"]:
        for _ in range(call.get("updates", 0)):
            decoder.flat.mul_(1.01)
            sampler.sync_weights(sampler.version + 1)
            sampler.generate(
                request["prompts"][:2],
                GenerationParams(SamplingParams(), 1, 4, frozenset()),
                RngKey(9, sampler.version),
            )
        generation_params = GenerationParams(
            SamplingParams(*call["distribution"]),
            call["samples"],
            call["max_tokens"],
            frozenset(call["stop_ids"]),
        )
        rollouts = sampler.generate(request["prompts"], generation_params, RngKey(*call["key"]))
        drawn.append(
            [
                [r.completion_ids, r.logprobs.view("int32").tolist(), r.finish, r.weight_version]
                for r in rollouts
            ]
        )
    metrics = (
        {m.name: m.value for m in sampler.llm.get_metrics() if hasattr(m, "value")}
        if request.get("metrics")
        else {}
    )
    print(
        "DRAWN",
        json.dumps({"drawn": drawn, "preemptions": metrics.get("vllm:num_preemptions", 0)}),
        flush=True,
    )
    sampler.close()
    os._exit(0)  # vLLM's threads would keep the process for seconds


if __name__ == "__main__":
    main()
