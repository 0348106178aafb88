"""The sampler `vllm-zerokl`: vLLM with zerokl's decoder inside. And what it shares with `vllm-exact`.

    python -m zerokl train CONFIG.toml --sampler vllm-zerokl

vLLM schedules, keeps the paged cache and shares prefixes. Our model, attention and draw run inside it (the
other modules of this package). So the tokens and their logprobs are those of the native sampler, bit for bit.

On a CPU tests/vllm shows it. On an H200, with vLLM 0.32's CUDA build, runs of 8 steps had mismatch 0.0 and
the native sampler's weights and fingerprint, in bf16, fp16 and fp32, with experts and with adapters. So had
one in bf16 with CUDA graphs.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ....files.dtypes import dtype_name
from ....kernels.attention_rule import WALK
from ....model.config import ModelConfig
from ....model.decoder import COMPUTE, Numerics
from ....model.lora import Lora
from ....model.routing import id_dtype
from ...config.vllm_section import VllmConfig
from ...processes.shared_tensor import SharedTensor
from ..stopwatch import Stopwatch
from ..types import Completion, Request, RequestSource, Sampler, check_requests
from .arguments import check_engine_arguments, guessing, vllm_context
from .experts import EXTENSION, experts_of
from .installed import require_vllm
from .start import starting_vllm

# By default vLLM wants most of a GPU to be free when it starts, but the trainer is already there. vLLM takes
# only vllm.cache_bytes and its weights.
ON_A_GPU = {"gpu_memory_utilization": 0.01}
# A whole forward of one token for each request is one CUDA graph. vLLM's compiler stays off: a graph replays
# the operations as they are.
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


def prepare_vllm(multiprocess: bool) -> None:
    """Set what vLLM reads from the environment when it is imported and started.

    Raises ValueError (see require_vllm).
    """
    require_vllm()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(multiprocess))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # vLLM counts ranks of tokens with a compiled function. Compiling takes seconds at the first call, and
    # zerokl does not use the result.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # The V2 runner is vLLM's default where Triton is installed. It has no logits processors of this kind.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"


def on_ranks(device: torch.device) -> dict[str, Any]:
    """The arguments of vllm.LLM that an engine in a process of several ranks has. All ranks start together.

    An engine in this process joins the process group that the ranks have, and there makes groups of one rank
    each; this is why they start together. On a GPU it must take that of its rank, which only the external
    launcher does. An engine in a process of its own knows nothing of the ranks.
    """
    if device.type != "cuda" or not dist.is_initialized() or dist.get_world_size() == 1:
        return {}
    return {"distributed_executor_backend": "external_launcher"}


class KeyedSampler(Sampler):
    """A vLLM engine whose tokens are drawn with zerokl's keys (draw.py).

    vLLM runs in this process, or in a process of its own (cfg.multiprocess).

    model: checkpoint folder.
    flat: the trainer's weights [layout.numel].
    transfer: the weight transfer engine (plugin.py), and the information that it starts with.
    arguments: further arguments of vllm.LLM, by vLLM's names.
    stopwatch: counts guesses, where tokens are guessed; None is one of its own.

    Raises ValueError for a vLLM that is not supported, or for a setting of `cfg.engine` that is refused.
    """

    def __init__(
        self,
        model: Path,
        config: ModelConfig,
        flat: torch.Tensor,
        cfg: VllmConfig,
        transfer: tuple[str, dict[str, Any]],
        arguments: Mapping[str, Any],
        stopwatch: Stopwatch | None = None,
    ):
        check_engine_arguments(cfg.engine)
        prepare_vllm(cfg.multiprocess)
        self.vocab, self.context = config.vocab_size, vllm_context(config, cfg)
        self._experts, self._names_experts = config.experts, False
        self.stopwatch = stopwatch or Stopwatch(flat.device)
        self._guesses = "speculative_config" in arguments
        self._in_process = not cfg.multiprocess
        if cfg.schedule_ahead and config.experts:
            raise ValueError(
                f"vllm.schedule_ahead (true): the experts of a {config.architecture} are read after each "
                "forward; set it to false"
            )
        from vllm import LLM

        from .plugin import register

        register()
        backend, init_info = transfer
        common = self._arguments(flat, cfg, backend)
        arguments = dict(arguments)
        if config.experts:
            arguments.setdefault("worker_extension_cls", EXTENSION)
        if cfg.cuda_graphs:
            arguments["compilation_config"] = arguments.get("compilation_config", {}) | GRAPHS
        with starting_vllm():
            self.llm = LLM(model=str(model), **(common | arguments | on_ranks(flat.device) | cfg.engine))
        try:
            self.llm.init_weight_transfer_engine({"init_info": init_info})
            self.sync_weights(0)
            if self._guesses:
                self.llm.collective_rpc("zerokl_guess")
        except BaseException:
            self.close()
            raise

    def _arguments(self, flat: torch.Tensor, cfg: VllmConfig, backend: str) -> dict[str, Any]:
        """The arguments of vllm.LLM that every KeyedSampler gives."""
        from vllm.config import WeightTransferConfig

        return dict(
            dtype=dtype_name(flat.dtype),
            enforce_eager=not cfg.cuda_graphs,
            async_scheduling=cfg.schedule_ahead,
            skip_tokenizer_init=True,
            logprobs_mode="processed_logits",
            logits_processors=["zerokl.engine.rollout.vllm.draw:KeyedDraw"],
            weight_transfer_config=WeightTransferConfig(backend=backend),
            max_model_len=self.context,
            max_num_seqs=cfg.max_concurrency,
            max_num_batched_tokens=cfg.max_batch_tokens,
            block_size=cfg.block_tokens,
            enable_chunked_prefill=cfg.chunked_prefill,
            enable_prefix_caching=cfg.prefix_caching,
            kv_cache_memory_bytes=cfg.cache_bytes,
            disable_log_stats=True,
        ) | (ON_A_GPU if flat.is_cuda else {})

    def sync_weights(self, version: int) -> None:
        """The weights are those in the trainer's memory. vLLM drops what it has cached with older weights."""
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {}})
        self.llm.finish_weight_update(weight_version=str(version))
        self._reset_cache()
        self.version = version

    def _reset_cache(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vllm: the prefix cache could not be reset; a request is still running")

    # Nothing is to be done at the end of turns: vLLM's cache has a fixed size, and vLLM drops what it needs.

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Raises ValueError for requests that no sampler can serve, and for a completion that was drawn with
        another version of the weights. Raises FloatingPointError where logits are not finite.
        """
        check_requests(requests, self.context, self.vocab)
        if not requests:
            return []
        self._prepare_experts(requests)
        params = [_vllm_params(request, i) for i, request in enumerate(requests)]
        ids = [{"prompt_token_ids": list(request.ids)} for request in requests]
        outputs = self.llm.generate(ids, params, use_tqdm=False)
        return self._completions([*zip(range(len(requests)), requests, outputs, strict=True)])

    def serve(self, source: RequestSource) -> None:
        """Raises as `generate` does."""
        engine, going = self.llm.llm_engine, {}
        while True:
            for place, request in source.ready(0 if going else 1):
                check_requests([request], self.context, self.vocab)
                self._prepare_experts([request])
                going[str(place)] = place, request
                ids = {"prompt_token_ids": list(request.ids)}
                engine.add_request(str(place), ids, _vllm_params(request, place))
            if not going:
                return
            ended = [(*going.pop(output.request_id), output) for output in engine.step()]
            for (place, *_), completion in zip(ended, self._completions(ended), strict=True):
                source.completed(place, completion)

    def _prepare_experts(self, requests: Sequence[Request]) -> None:
        """Let vLLM keep experts where a request asks for them. No request runs, and nothing stays cached."""
        asked = self._experts is not None and any(request.draw_params.experts for request in requests)
        if asked and not self._names_experts:
            self.llm.collective_rpc("zerokl_name_experts")
            self._reset_cache()
            self._names_experts = True

    def _completions(self, ended: Sequence[tuple[int, Request, Any]]) -> list[Completion]:
        """The completions of requests, each with its number and vLLM's output."""
        completions = [self._completion(request, output) for _, request, output in ended]
        if self._guesses and ended:
            (counts,) = self.llm.collective_rpc("zerokl_guess_counts")
            self.stopwatch.counts.update(counts, tokens=sum(len(c.ids) for c in completions))
        numbers = [number for number, request, _ in ended if request.draw_params.experts]
        if not numbers or not self._names_experts:
            return completions
        (answers,) = self.llm.collective_rpc("zerokl_take_experts", args=(numbers,))
        dtype = id_dtype(self._experts.number)
        by_number = {n: experts_of(answer, dtype) for n, answer in zip(numbers, answers, strict=True)}
        return [
            replace(c, experts=by_number[n][: len(request.ids) + len(c.ids) - 1]) if n in by_number else c
            for c, (n, request, _) in zip(completions, ended, strict=True)
        ]

    def _completion(self, request: Request, output: Any) -> Completion:
        (completion,) = output.outputs
        versions = {span.version for span in completion.weight_versions}
        if versions != {str(self.version)}:
            raise ValueError(
                f"vllm: prompt {request.rng_key.prompt}, sample {request.rng_key.sample} was drawn with "
                f"weights {versions}, "
                f"not with version {self.version}"
            )
        tokens = tuple(completion.token_ids)
        logprobs = [completion.logprobs[i][token].logprob for i, token in enumerate(tokens)]
        logp = np.array(logprobs, np.float32)
        if not np.isfinite(logp).all():
            key = request.rng_key
            guessed = ", which a guess may have caused: set vllm.speculate = 0" if self._guesses else ""
            raise FloatingPointError(
                f"sampler: the logits of prompt {key.prompt}, sample {key.sample}, "
                f"position {request.drawn + int(np.argmin(np.isfinite(logp)))} are not finite{guessed}"
            )
        return Completion(tokens, logp, completion.finish_reason, self.version)

    def close(self) -> None:
        """End the engine.

        vLLM's own end of an engine in this process destroys the process group. The ranks still need theirs.
        """
        core = self.llm.llm_engine.engine_core
        if self._in_process and dist.is_initialized() and dist.get_world_size() > 1:
            core._finalizer.detach()  # it would do the same when Python ends
            core.engine_core.model_executor.shutdown()
        else:
            core.shutdown()


def _vllm_params(request: Request, number: int) -> Any:
    """vLLM's own SamplingParams of a request. An output comes when it has ended. number: see draw.py."""
    import vllm
    from vllm.sampling_params import RequestOutputKind

    from .draw import request_arguments

    return vllm.SamplingParams(
        temperature=0.0,
        max_tokens=request.max_tokens,
        stop_token_ids=sorted(request.draw_params.stop_ids),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=request_arguments(request, number),
    )


class VllmZeroklSampler(KeyedSampler):
    """vLLM with zerokl's model and attention inside, which compute with the trainer's own memory.

    weights: [layout.numel] in the compute dtype. On a CPU, memory that vLLM's process can map. On a GPU vLLM
        is in this process, and the weights are the trainer's tensor itself; with cfg.cuda_graphs a copy.
    frozen: the weights that are not trained, by their names in the layout.
    value_head: whether a critic's head is among the weights; vLLM does not read it.
    has_weights: whether the folder `model` has the weights too, and not only config.json.
    adapters: LoRA's, that are not merged into the weights, and their shape. They lie where the weights lie.
    stopwatch: see KeyedSampler.

    Raises ValueError as KeyedSampler does.
    """

    def __init__(
        self,
        model: Path,
        config: ModelConfig,
        weights: SharedTensor | torch.Tensor,
        cfg: VllmConfig,
        numerics: Numerics = COMPUTE,
        frozen: Collection[str] = (),
        value_head: bool = False,
        has_weights: bool = True,
        adapters: tuple[Lora, SharedTensor | torch.Tensor] | None = None,
        stopwatch: Stopwatch | None = None,
    ):
        from .plugin import (
            ARCHITECTURE,
            ATTENTION,
            FROZEN,
            HAS_VALUE_HEAD,
            KV,
            LORA,
            OWN,
            SHARED,
            TILES_OVERRIDE,
        )

        assert numerics.cache is None, "engine/config/compatibility.py refuses it"
        overrides = {
            "architectures": [ARCHITECTURE],
            # Windows are our attention's. vLLM would free the blocks before them, and plan with fewer.
            "sliding_window": None,
            # Weights come from the trainer, as numbers.
            **({"quantization_config": None} if config.raw.get("quantization_config") else {}),
            FROZEN: sorted(frozen),
            HAS_VALUE_HEAD: value_head,
            TILES_OVERRIDE: numerics.tiles.vllm,
            **({KV: list(numerics.kv)} if numerics.kv else {}),
            **({ATTENTION: list(numerics.attention)} if numerics.attention != WALK else {}),
            **({"head_dtype": dtype_name(numerics.lm_head)} if numerics.lm_head else {}),
        }
        beside = None
        if adapters is not None:
            overrides[LORA], beside = list(adapters[0]), adapters[1]
        if isinstance(weights, SharedTensor):
            handles = weights.handle._asdict() | {"adapters": beside and list(beside.handle)}
            flat, transfer = weights.tensor, (SHARED, handles)
        else:
            info = {"flat": weights, "adapters": beside, "copy": cfg.cuda_graphs}
            flat, transfer = weights, (OWN, info)
        is_read = has_weights and "quantization_config" not in overrides
        arguments = {"hf_overrides": overrides} | ({} if is_read else {"load_format": "dummy"})
        if cfg.speculate:
            arguments |= guessing(cfg.speculate)
        super().__init__(model, config, flat, cfg, transfer, arguments, stopwatch)

    def weights(self) -> torch.Tensor:
        """Those that vLLM's model computes with, [layout.numel]. For an engine in this process."""
        (flat,) = self.llm.apply_model(lambda model: model.decoder.flat)
        return flat.detach()
