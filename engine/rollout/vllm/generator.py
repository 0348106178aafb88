"""The sampler `vllm`: vLLM as it comes, with its own model, attention and draw. Nothing is patched."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....files.dtypes import dtype_name
from ....model.routing import id_dtype
from ....model.sizes import Experts
from ..types import GenerationParams, Rollout
from .exact import refuse_after_exact
from .experts import EXPERTS, EXTENSION, experts_of
from .installed import is_cpu_build
from .sampler import ON_A_GPU, on_ranks, prepare_vllm
from .start import starting_vllm

# Tokens of a sequence at most, and bytes of the key-value cache.
CONTEXT, CACHE_BYTES = 4096, 1 << 30
# Where a forward ends within a prompt, vLLM draws all the same and sets the request's generator back, which
# those of a CPU refuse (vllm/v1/worker/gpu_model_runner.py). So no forward ends within a prompt.
ON_A_CPU = {"enable_chunked_prefill": False}


class VllmGenerator:
    """vLLM in this process, uncompiled, with no prefix cache. Its logits are in `head` where given.

    experts: of a mixture of experts whose completions may name them.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        context: int,
        head: torch.dtype | None = None,
        experts: Experts | None = None,
    ):
        refuse_after_exact()
        prepare_vllm(multiprocess=False)
        self._experts, self._names_experts = experts, False
        from vllm import LLM

        with starting_vllm():
            self.llm = LLM(
                model=str(folder),
                dtype=dtype_name(dtype),
                max_model_len=min(context, CONTEXT),
                enforce_eager=True,
                skip_tokenizer_init=True,
                max_num_batched_tokens=max(2048, min(context, CONTEXT)),
                logprobs_mode="processed_logprobs",
                enable_prefix_caching=False,
                kv_cache_memory_bytes=CACHE_BYTES,
                hf_overrides={} if head in (None, dtype) else {"head_dtype": dtype_name(head)},
                **({"worker_extension_cls": EXTENSION} if experts else {}),
                **(ON_A_CPU if is_cpu_build() else ON_A_GPU | on_ranks(torch.device("cuda"))),
            )

    def generate(
        self, prompts: Sequence[Sequence[int]], generation_params: GenerationParams, seed: int
    ) -> list[Rollout]:
        """One completion of each prompt, with the logprobs of its tokens."""
        return self.draw(prompts, generation_params, [(seed << 20) + i for i in range(len(prompts))])

    def draw(
        self, prompts: Sequence[Sequence[int]], generation_params: GenerationParams, seeds: Sequence[int]
    ) -> list[Rollout]:
        """As `generate`, with a seed for each prompt. So its draws do not depend on its company."""
        names_experts = generation_params.experts and self._experts is not None
        if names_experts and not self._names_experts:
            self.llm.collective_rpc("zerokl_name_experts")
            self._names_experts = True
        sampling_params = generation_params.sampling_params
        requests = [
            request_params(
                temperature=sampling_params.temperature,
                top_k=sampling_params.top_k,
                top_p=sampling_params.top_p,
                min_p=sampling_params.min_p,
                logit_bias=dict(sampling_params.logit_bias) or None,
                allowed_token_ids=sampling_params.allowed_token_ids
                and list(sampling_params.allowed_token_ids),
                max_tokens=generation_params.max_tokens,
                logprobs=0,
                seed=seeds[i],
                stop_token_ids=sorted(generation_params.stop_ids),
                extra_args={EXPERTS: i} if names_experts else None,
            )
            for i in range(len(prompts))
        ]
        rollouts, experts = [], [None] * len(prompts)
        outputs = self.run([list(p) for p in prompts], requests)
        if names_experts:
            (answers,) = self.llm.collective_rpc("zerokl_take_experts", args=(range(len(prompts)),))
            experts = [experts_of(answer, id_dtype(self._experts.number)) for answer in answers]
        for i, out in enumerate(outputs):
            (completion,) = out.outputs
            tokens = tuple(completion.token_ids)
            logprobs = [completion.logprobs[n][token].logprob for n, token in enumerate(tokens)]
            logp, finish = np.array(logprobs, np.float32), completion.finish_reason
            # A vLLM that schedules ahead may have computed the last token too.
            named = None if experts[i] is None else experts[i][: len(prompts[i]) + len(tokens) - 1]
            rollouts.append(Rollout.of_one_turn(i, 0, prompts[i], tokens, logp, finish, 0, named))
        return rollouts

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Compute with these weights from now on.

        They have checkpoint names and any float dtype, and are rounded to the model's dtype.
        """
        from .weight_transfer import pack_head

        # vLLM's own way of loading again. It undoes and repeats what vLLM did to the weights after it first
        # loaded them. vLLM is in this process, so nothing is pickled.
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(list(weights.items()))})
        self.llm.apply_model(pack_head)

    def run(self, ids: list[list[int]], params: Any) -> list[Any]:
        """vLLM's own outputs for prompts of token ids. params: vLLM's own, one for all or one for each."""
        return self.llm.generate([{"prompt_token_ids": x} for x in ids], params, use_tqdm=False)


def request_params(**options: Any) -> Any:
    """vLLM's own SamplingParams."""
    from vllm import SamplingParams

    return SamplingParams(ignore_eos=True, detokenize=False, **options)
