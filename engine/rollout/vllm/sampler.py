"""vLLM as zerokl's sampler.

    python -m zerokl train CONFIG.toml --sampler vllm

vLLM schedules, keeps the paged cache and shares prefixes; our model, attention and draw run inside it (see
the package's other modules). So the tokens and their logprobs are those of the native sampler, bit for bit.
On a CPU that is tested; on a GPU it has not run.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....model.config import ModelConfig
from ....model.decoder import COMPUTE, Numerics
from ...config import VllmConfig
from ...shared_tensor import SharedTensor
from ..native import check_prompts
from ..types import GenerationParams, RngKey, Rollout
from .arguments import check_engine_arguments
from .installed import require_vllm

# vLLM wants most of a GPU to be free when it starts, where the trainer already is; what it takes is
# vllm.cache_bytes and its weights.
ON_A_GPU = {"gpu_memory_utilization": 0.01}


def prepare_vllm(multiprocess: bool) -> None:
    """Set what vLLM reads from the environment when it is imported and started.

    Raises ValueError (see require_vllm).
    """
    require_vllm()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(multiprocess))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # vLLM counts ranks of tokens with a compiled function, for seconds at the first call; the result is not
    # used here.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # The other runner, its default where Triton is, knows no logits processors of this kind.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"


class KeyedSampler:
    """A vLLM engine whose tokens are drawn with zerokl's rng_key (draw.py), in this process or in one of its
    own.

    model: checkpoint folder. transfer: the weight transfer engine (plugin.py), and what it is told at the
    start. arguments: more of vllm.LLM's, by vLLM's names. Raises ValueError for a vLLM that is not supported
    or a setting of `cfg.engine` that is refused.
    """

    def __init__(
        self,
        model: Path,
        config: ModelConfig,
        flat: torch.Tensor,
        cfg: VllmConfig,
        transfer: tuple[str, dict[str, Any]],
        version: int,
        arguments: Mapping[str, Any],
    ):
        check_engine_arguments(cfg.engine)
        prepare_vllm(cfg.multiprocess)
        self.vocab, self.context = config.vocab_size, min(config.max_positions, cfg.context or 4096)
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        from .plugin import register

        register()
        own = dict(
            dtype=str(flat.dtype).removeprefix("torch."),
            enforce_eager=True,
            async_scheduling=False,
            skip_tokenizer_init=True,
            logprobs_mode="processed_logits",
            logits_processors=["zerokl.engine.rollout.vllm.draw:KeyedDraw"],
            weight_transfer_config=WeightTransferConfig(backend=transfer[0]),
            max_model_len=self.context,
            max_num_seqs=cfg.max_concurrency,
            max_num_batched_tokens=cfg.max_batch_tokens,
            block_size=cfg.block_tokens,
            enable_chunked_prefill=cfg.chunked_prefill,
            enable_prefix_caching=cfg.prefix_caching,
            kv_cache_memory_bytes=cfg.cache_bytes,
            disable_log_stats=True,
        )
        self.llm = LLM(
            model=str(model), **(own | (ON_A_GPU if flat.is_cuda else {}) | dict(arguments) | cfg.engine)
        )
        try:
            self.llm.init_weight_transfer_engine({"init_info": transfer[1]})
            self.sync_weights(version)
        except BaseException:
            self.close()
            raise

    def sync_weights(self, version: int) -> None:
        """See Sampler.

        The weights are those in the trainer's memory; what vLLM has cached of older ones is dropped.
        """
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {}})
        self.llm.finish_weight_update(weight_version=str(version))
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "vllm: the prefix cache could not be reset after a weight update; a request is still running"
            )
        self.version = version

    def generate(
        self, prompts: Sequence[Sequence[int]], generation_params: GenerationParams, rng_key: RngKey
    ) -> list[Rollout]:
        """See Sampler.

        Raises ValueError for what cannot be drawn from, or for a rollout of other weights than asked for.
        """
        import vllm
        from vllm.sampling_params import RequestOutputKind

        from .draw import request_arguments

        check_prompts(prompts, generation_params, self.context, self.vocab)
        places = [(p, s) for p in range(len(prompts)) for s in range(generation_params.num_generations)]
        params = [
            vllm.SamplingParams(
                temperature=0.0,
                max_tokens=generation_params.max_tokens,
                stop_token_ids=sorted(generation_params.stop_ids),
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                flat_logprobs=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args=request_arguments(
                    generation_params.sampling_params, rng_key, rng_key.first_prompt + p, s
                ),
            )
            for p, s in places
        ]
        ids = [{"prompt_token_ids": [int(t) for t in prompts[p]]} for p, _ in places]
        outputs = self.llm.generate(ids, params, use_tqdm=False)
        return [
            self._rollout(o, rng_key.first_prompt + p, s) for o, (p, s) in zip(outputs, places, strict=True)
        ]

    def _rollout(self, output: Any, prompt: int, sample: int) -> Rollout:
        (done,) = output.outputs
        versions = {span.version for span in done.weight_versions}
        if versions != {str(self.version)}:
            raise ValueError(
                f"vllm: prompt {prompt}, sample {sample} was drawn with weights {versions}, not with version {self.version}"
            )
        tokens = tuple(done.token_ids)
        logprobs = np.array([done.logprobs[i][token].logprob for i, token in enumerate(tokens)], np.float32)
        return Rollout(
            prompt, sample, tuple(output.prompt_token_ids), tokens, logprobs, done.finish_reason, self.version
        )

    def close(self) -> None:
        """End the engine."""
        self.llm.llm_engine.engine_core.shutdown()


class VllmSampler(KeyedSampler):
    """vLLM with zerokl's model and attention inside, computing with the trainer's own memory.

    weights [numel] in the compute dtype: memory that vLLM's process can map (CPU), or the trainer's tensor
    itself, for vLLM in this process (GPU). Raises ValueError as KeyedSampler does.
    """

    def __init__(
        self,
        model: Path,
        config: ModelConfig,
        weights: SharedTensor | torch.Tensor,
        cfg: VllmConfig,
        numerics: Numerics = COMPUTE,
        version: int = 0,
    ):
        from .plugin import ARCHITECTURE, OWN, SHARED

        assert numerics.cache is None, "refused by compatibility.py"
        overrides = {
            "architectures": [ARCHITECTURE],
            **({"head_dtype": str(numerics.lm_head)[6:]} if numerics.lm_head else {}),
        }
        if isinstance(weights, SharedTensor):
            flat, transfer = weights.tensor, (SHARED, weights.handle._asdict())
        else:
            flat, transfer = weights, (OWN, {"flat": weights})
        super().__init__(model, config, flat, cfg, transfer, version, {"hf_overrides": overrides})
