"""The arguments of vLLM's engine that a run may set (`vllm.engine`), each with the reason.

Every other argument is refused. So an argument that a new vLLM brings is refused until somebody has looked at
it. tests/vllm/test_arguments.py keeps a list of the arguments that were looked at, and compares it with the
arguments of the installed vLLM.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from ....model.config import ModelConfig
from ...config.vllm_section import VllmConfig

_LOGS = "what is logged or measured; no forward depends on it"
_MEMORY = "how much memory is taken; a row's bits do not depend on where its keys lie"
_SCHEDULE = "which requests share a forward; a row's bits do not depend on the others (the law)"
_FILES = "how files are read; the weights are the trainer's afterwards"
_PROCESS = "where and how long processes run; no forward depends on it"

# Argument -> why it keeps the law.
ALLOWED: dict[str, str] = {
    "aggregate_engine_logging": _LOGS,
    "collect_detailed_traces": _LOGS,
    "cudagraph_metrics": _LOGS,
    "disable_log_stats": _LOGS,
    "enable_logging_iteration_details": _LOGS,
    "enable_mfu_metrics": _LOGS,
    "kv_cache_metrics": _LOGS,
    "kv_cache_metrics_sample": _LOGS,
    "log_config_file": _LOGS,
    "log_level": _LOGS,
    "logging_config": _LOGS,
    "otlp_traces_endpoint": _LOGS,
    "profiler_config": _LOGS,
    "served_model_name": _LOGS,
    "show_hidden_metrics_for_version": _LOGS,
    "gpu_memory_utilization": _MEMORY,
    "num_gpu_blocks_override": _MEMORY,
    "watermark": _MEMORY,
    "long_prefill_token_threshold": _SCHEDULE,
    "max_num_scheduled_tokens": _SCHEDULE,
    "prefill_schedule_interval": _SCHEDULE,
    "scheduler_reserve_full_isl": _SCHEDULE,
    "scheduling_policy": _SCHEDULE,
    "stream_interval": _SCHEDULE,
    "download_dir": _FILES,
    "max_parallel_loading_workers": _FILES,
    "safetensors_load_strategy": _FILES,
    "use_tqdm_on_load": _FILES,
    "distributed_timeout_seconds": _PROCESS,
    "numa_bind": _PROCESS,
    "numa_bind_cpus": _PROCESS,
    "numa_bind_nodes": _PROCESS,
    "shutdown_timeout": _PROCESS,
}

# Argument -> the setting of zerokl that decides it.
SET_BY_ZEROKL: dict[str, str] = {
    "model": "model",
    "dtype": "dtype",
    "seed": "seed",
    "max_model_len": "vllm.context",
    "max_num_seqs": "vllm.max_concurrency",
    "max_num_batched_tokens": "vllm.max_batch_tokens",
    "block_size": "vllm.block_tokens",
    "enable_chunked_prefill": "vllm.chunked_prefill",
    "enable_prefix_caching": "vllm.prefix_caching",
    "async_scheduling": "vllm.schedule_ahead",
    "kv_cache_memory_bytes": "vllm.cache_bytes",
    "distributed_executor_backend": "vllm.multiprocess",
}

# Argument -> why it is refused. Any other that is not in a table is refused because nobody has looked at it.
_SPLIT_SUMS = (
    "it cuts the sums of a product in parts, which are added in another order than the trainer's; start one "
    "engine on each rank with torchrun, which splits the prompts"
)
_RANKS = "each rank has an engine of its own, which zerokl gives its part of the prompts; start more ranks"
_BY_CHANCE = (
    "vLLM accepts a guess by chance, and does not compare it with the token that its key draws; set "
    "vllm.speculate, whose guesses decide no bit"
)
REFUSED: dict[str, str] = {
    "tensor_parallel_size": _SPLIT_SUMS,
    "decode_context_parallel_size": _SPLIT_SUMS,
    "prefill_context_parallel_size": _SPLIT_SUMS,
    "enable_expert_parallel": _SPLIT_SUMS,
    "pipeline_parallel_size": "vLLM gets whole weights; start one engine on each rank with torchrun",
    "data_parallel_size": _RANKS,
    "speculative_config": _BY_CHANCE,
}


def check_engine_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument that is not allowed, with the remedy."""
    for name, value in arguments.items():
        if name in ALLOWED:
            continue
        if name in REFUSED:
            raise ValueError(f"vllm.engine: {name} ({value!r}) is refused: {REFUSED[name]}")
        if name in SET_BY_ZEROKL:
            raise ValueError(f"vllm.engine: {name} ({value!r}) is refused: set {SET_BY_ZEROKL[name]}")
        close = difflib.get_close_matches(name, ALLOWED, 1)
        hint = f"did you mean {close[0]}?" if close else f"allowed are {', '.join(ALLOWED)}"
        raise ValueError(f"vllm.engine: {name} ({value!r}) is not known to keep the bits of a result; {hint}")


def guessing(k: int) -> dict[str, Any]:
    """The arguments with which vLLM takes k guesses of ours for a request at most in one forward."""
    proposer = "zerokl.engine.rollout.vllm.proposer"
    config = {"method": "custom_class", "model": f"{proposer}.Proposer", "num_speculative_tokens": k}
    extension = f"{proposer}.ProposesTokens"
    return {"speculative_config": config, "logits_processors": None, "worker_extension_cls": extension}


def vllm_context(config: ModelConfig, cfg: VllmConfig) -> int:
    """The tokens of the longest sequence that vLLM takes (max_model_len)."""
    return min(config.max_positions, cfg.context or 4096)
