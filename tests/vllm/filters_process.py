"""vLLM's sampler on given logits, in a process of its own: how many filtered logits are not ours, as JSON.

Not a test: a script of test_filters.py. It takes sampling parameters as JSON from the standard input, those
of vLLM's requests and ours: one row of logits has one of them. vLLM's sampler returns what it draws from,
because logprobs_mode is "processed_logits".
"""

import json
import sys
from types import SimpleNamespace

import torch
import vllm
from vllm.v1.sample.logits_processor import BatchUpdate, build_logitsprocs
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from zerokl.engine.rollout.vllm.generator import request_params
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.truncation import scaled_logits

# Rows of logits for each of the parameters.
ROWS, V = 8, 997


def request_of(params: SamplingParams) -> vllm.SamplingParams:
    return request_params(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        logit_bias=dict(params.logit_bias) or None,
        allowed_token_ids=params.allowed_token_ids and list(params.allowed_token_ids),
    )


def metadata_of(requests: list[vllm.SamplingParams]) -> SamplingMetadata:
    """What vLLM's worker hands to its sampler for one token of each request."""
    n, zeros = len(requests), torch.zeros(len(requests))
    config = SimpleNamespace(speculative_config=None, scheduler_config=SimpleNamespace(max_num_seqs=n))
    processors = build_logitsprocs(config, torch.device("cpu"), False, False)
    added = [(i, request, None, []) for i, request in enumerate(requests)]
    for processor in processors.all:
        processor.update_state(BatchUpdate(batch_size=n, removed=[], added=added, moved=[]))
    forbidden = torch.zeros(n, V, dtype=torch.bool)
    for row, request in zip(forbidden, requests, strict=True):
        if request.allowed_token_ids:
            row.fill_(True)[request.allowed_token_ids] = False
    greedy = [request.temperature == 0.0 for request in requests]
    return SamplingMetadata(
        temperature=torch.tensor([request.temperature for request in requests]),
        all_greedy=all(greedy),
        all_random=not any(greedy),
        top_p=torch.tensor([request.top_p for request in requests]),
        top_k=torch.tensor([request.top_k or V for request in requests]),
        generators={},
        max_num_logprobs=-1,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=zeros,
        presence_penalties=zeros,
        repetition_penalties=zeros + 1.0,
        output_token_ids=[[] for _ in requests],
        allowed_token_ids_mask=forbidden,
        bad_words_token_ids={},
        logitsprocs=processors,
    )


def main() -> None:
    vllm_params, ours = ([SamplingParams.of(*params) for params in side] for side in json.load(sys.stdin))
    logits = torch.randn(len(ours) * ROWS, V, generator=torch.Generator().manual_seed(3)) * 2.5
    metadata = metadata_of([request_of(params) for params in vllm_params for _ in range(ROWS)])
    processed = Sampler("processed_logits")(logits.clone(), metadata).logprobs_tensors.logprobs
    unequal = []
    for rows, drawn_from, params in zip(logits.split(ROWS), processed.split(ROWS), ours, strict=True):
        z = scaled_logits(rows, params)
        unequal.append(int((z.view(torch.int32) != drawn_from.view(torch.int32)).sum()))
    print("REPORT", json.dumps({"unequal": unequal, "shape": list(processed.shape)}), flush=True)


if __name__ == "__main__":
    main()
