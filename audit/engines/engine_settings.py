"""What decides the bits of an engine beside checkpoint and dtypes: kernels, compilation, caches, versions.

Every function returns names and values as text, as reports show and compare them.
"""

import os
from collections.abc import Iterable
from typing import Any

import torch

from ...files.dtypes import dtype_name
from ...kernels.backend import on_triton
from ...model.decoder import Decoder
from ...verify.run_environment import PACKAGE_ROOT, environment

Settings = dict[str, str]
# Of verify/run_environment.py: what decides no bit, or is listed elsewhere in a report.
_ELSEWHERE = (
    "code",
    "system",
    "device",
    "python",
    "torch",
    "numpy",
    "safetensors",
    "transformers",
    "tokenizers",
    "triton",
    "vllm",
)


def zerokl_settings(decoder: Decoder) -> Settings:
    """Of our decoder, which has no choice of backends."""
    triton = on_triton(decoder.flat)
    return {
        "attention backend": "zerokl, Triton" if triton else "zerokl, plain torch with fixed tiles",
        "cache dtype": dtype_name(decoder.cache_dtype),
        "compilation": "none",
        "quantisation": "none",
    }


def hf_settings(model: Any) -> Settings:
    """Of a model of transformers."""
    config = model.config
    quantised = getattr(config, "quantization_config", None)
    experts = any("experts" in name for name, _ in model.named_modules())
    return {
        "attention backend": str(config._attn_implementation),
        "cache dtype": dtype_name(model.dtype),
        "compilation": "none",
        "quantisation": str(getattr(quantised, "quant_method", quantised) or "none"),
    } | ({"MoE backend": str(config._experts_implementation)} if experts else {})


def vllm_settings(llm: Any) -> Settings:
    """Of a vLLM engine in this process: what its configuration says, and which classes compute.

    llm: vllm.LLM. The configuration is vllm.config.VllmConfig. A backend that it calls auto is found in the
    layers.
    """
    cfg = llm.llm_engine.vllm_config
    (layers,) = llm.apply_model(_backends)
    return {
        "attention backend": ", ".join(layers["attention"]) or str(cfg.attention_config.backend),
        "cache dtype": str(cfg.cache_config.cache_dtype),
        "cache block": str(cfg.cache_config.block_size),
        "prefix cache": _on(cfg.cache_config.enable_prefix_caching),
        "compilation": _enum(cfg.compilation_config.mode),
        "graphs": _enum(cfg.compilation_config.cudagraph_mode),
        "custom operations": ", ".join(sorted(cfg.compilation_config.custom_ops)) or "none",
        "quantisation": str(cfg.model_config.quantization or "none"),
        "linear backend": ", ".join(layers["linear"]) or str(cfg.kernel_config.linear_backend),
        "MoE backend": ", ".join(layers["experts"]) or "no experts",
        "chunked prefill": _on(cfg.scheduler_config.enable_chunked_prefill),
        "tokens of a pass": str(cfg.scheduler_config.max_num_batched_tokens),
        "asynchronous scheduling": _on(bool(cfg.scheduler_config.async_scheduling)),
        "tensor parallel": str(cfg.parallel_config.tensor_parallel_size),
        "pipeline parallel": str(cfg.parallel_config.pipeline_parallel_size),
        "logprobs": str(cfg.model_config.logprobs_mode),
        "batch-invariant mode": _on(os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")),
    }


def _backends(model: torch.nn.Module) -> dict[str, list[str]]:
    """The classes that compute attention, products and experts in a model of vLLM, each named once."""
    classes: dict[str, list[str]] = {"attention": [], "linear": [], "experts": []}
    for module in model.modules():
        if backend := getattr(module, "attn_backend", None):
            classes["attention"].append(backend.__name__)
        if (method := getattr(module, "quant_method", None)) is None:
            continue
        experts = "MoE" in type(method).__name__ or "MoE" in type(module).__name__
        choices = [f"{k} {_enum(v)}" for k, v in sorted(vars(method).items()) if k.endswith("backend")]
        classes["experts" if experts else "linear"].append(" ".join([type(method).__name__, *choices]))
    return {kind: _each_once(names) for kind, names in classes.items()}


def machine_settings(device: torch.device) -> Settings:
    """Of the machine: processor, libraries, and the variables that steer them."""
    values = environment(PACKAGE_ROOT, device, {})
    settings = {name: str(value) for name, value in values.items() if name not in _ELSEWHERE}
    return settings | {
        "threads": str(torch.get_num_threads()),
        "float32 products": torch.get_float32_matmul_precision(),
    }


def _each_once(names: Iterable[str]) -> list[str]:
    return sorted(set(names))


def _enum(value: Any) -> str:
    return str(getattr(value, "name", value))


def _on(value: bool) -> str:
    return "on" if value else "off"
