"""Adapters of PEFT in plain torch: written, merged by a sum of weights, or beside them by forward hooks.

Shapes: W [N, K]; A [r, K]; B [N, r].
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from .world import Log, World

_RANK, _ALPHA, _TARGETS = 4, 8, ("q_proj", "down_proj")


class Adapter(NamedTuple):
    """A folder of PEFT, and by weight the whole product s B A and its two factors."""

    folder: Path
    products: dict[str, torch.Tensor]
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]]  # B and A


def written(w: World, name: str = "adapter", seed: int = 0) -> Adapter:
    """An adapter of random A and B on two kinds of projections."""
    folder = w.folder.with_name(f"{w.folder.name}-{name}")
    generator = torch.Generator().manual_seed(w.seed + seed)
    tensors, products, factors = {}, {}, {}
    for weight, x in w.fp32.named_parameters():
        if any(f".{t}.weight" in weight for t in _TARGETS):
            a = torch.randn(_RANK, x.shape[1], generator=generator) * 0.1
            b = torch.randn(x.shape[0], _RANK, generator=generator) * 0.1
            key = f"base_model.model.{weight.removesuffix('.weight')}"
            tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
            products[weight], factors[weight] = _ALPHA / _RANK * (b @ a), (b, a)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": _RANK, "lora_alpha": _ALPHA, "bias": "none"}
    config |= {"target_modules": list(_TARGETS), "base_model_name_or_path": str(w.folder)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return Adapter(folder, products, factors)


def with_products(
    w: World,
    products: dict[str, torch.Tensor],
    share: float = 1.0,
    merged: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    dtype: torch.dtype | None = None,
) -> torch.nn.Module:
    """The model with a share of the products in its weights. merged: what becomes of each sum."""
    return w.changed(
        lambda n, x: merged(x + share * products[n]) if n in products else None, dtype or w.dtype
    )


def beside(w: World, adapter: Adapter) -> torch.nn.Module:
    """An fp32 model that adds s (x A) B to x W, where W is what a merge in bf16 and its reverse have left."""

    def left(name: str, x: torch.Tensor) -> torch.Tensor:
        x = x.bfloat16().float()
        if name not in adapter.products:
            return x
        return ((x + adapter.products[name]).bfloat16().float() - adapter.products[name]).bfloat16().float()

    model = w.changed(left, w.exact)
    for name, (b, a) in adapter.factors.items():
        module = model.get_submodule(name.removesuffix(".weight"))
        module.register_forward_hook(lambda _, x, y, a=a, b=b: y + _ALPHA / _RANK * ((x[0] @ a.t()) @ b.t()))
    return model


def log_of(w: World, sampler: torch.nn.Module, adapter: Adapter, *others: Adapter) -> Log:
    """What a sampler draws beside a trainer with the whole adapter, merged in fp32."""
    merged = w.copy("merged")
    with_products(w, adapter.products, dtype=w.exact).save_pretrained(merged)
    lines = w.both(w.drawn(model=sampler), model=w.model(merged, w.exact))
    names = tuple(str(x.folder) for x in (adapter, *others))
    return w.log(lines, options={"model": str(merged), "adapter": names})
