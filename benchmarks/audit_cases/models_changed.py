"""Faults of a model's files and of its cache: defaults of one side, tensors left out, adapters, 8 bits."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from plants import _sampler, plant
from safetensors.torch import save_file
from sampling import AlteredCache, Settings, changed, load
from world import USUAL, Log, World

# --- generation_config.json ---


def _obeyed(w: World, drawn: Settings, declared: Settings, **defaults) -> Log:
    """A sampler that obeys the defaults of a checkpoint, beside a trainer that does not."""
    name = "-".join(f"{k}{v}" for k, v in defaults.items())
    folder = w.root / f"{w.family}-defaults-{name}"
    shutil.copytree(w.folder, folder, dirs_exist_ok=True)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | defaults))
    return _sampler(w, drawn=drawn, declared=declared, options={"model": str(folder)})


@plant("settings", "generation_config")
def all_defaults_obeyed(w: World) -> Log:
    t, p = w.uniform(0.6, 0.75), w.uniform(0.8, 0.95)
    drawn = Settings(temperature=t, top_k=20, top_p=p)
    return _obeyed(w, drawn, Settings(), temperature=t, top_k=20, top_p=p)


@plant("settings", "generation_config")
def defaults_obeyed_but_for_the_temperature(w: World) -> Log:
    p = w.uniform(0.8, 0.9)
    return _obeyed(w, replace(USUAL, top_p=p), USUAL, temperature=0.6, top_p=p, do_sample=True)


@plant("settings", "generation_config", "repetition penalty")
def default_penalty_obeyed(w: World) -> Log:
    x = w.uniform(1.05, 1.15)
    return _obeyed(w, replace(USUAL, repetition=x), USUAL, repetition_penalty=x)


# --- weights and adapters ---


@plant("weights", "incomplete sync")
def norms_left_out_of_a_sync(w: World) -> Log:
    old = dict(load(w.old).named_parameters())
    model = changed(w.fp32, lambda name, _: old[name] if "norm" in name else None)
    return _sampler(w, model.bfloat16(), options={"checkpoints": (str(w.old),)})


@plant("weights", "incomplete sync")
def attention_left_out_of_a_sync(w: World) -> Log:
    old = dict(load(w.old).named_parameters())
    model = changed(w.fp32, lambda name, _: old[name] if "self_attn" in name else None)
    return _sampler(w, model.bfloat16(), options={"checkpoints": (str(w.old),)})


def _adapted(w: World) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """A PEFT folder, the folder of the merged model, and the adapter's whole products by weight."""
    adapter, merged = w.root / f"{w.family}-adapter", w.root / f"{w.family}-merged"
    generator, rank, alpha = torch.Generator().manual_seed(w.seed), 4, 8
    tensors, products = {}, {}
    targets = ("q_proj", "down_proj")
    for name, x in w.fp32.named_parameters():
        if any(f".{t}.weight" in name for t in targets):
            a = torch.randn(rank, x.shape[1], generator=generator) * 0.1
            b = torch.randn(x.shape[0], rank, generator=generator) * 0.1
            key = f"base_model.model.{name.removesuffix('.weight')}"
            tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
            products[name] = alpha / rank * (b @ a)
    adapter.mkdir(exist_ok=True)
    save_file(tensors, adapter / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "bias": "none"}
    said |= {"target_modules": list(targets), "base_model_name_or_path": str(w.folder)}
    (adapter / "adapter_config.json").write_text(json.dumps(said))
    shutil.copytree(w.folder, merged, dirs_exist_ok=True)
    changed(w.fp32, lambda n, x: x + products[n] if n in products else None).save_pretrained(merged)
    return adapter, merged, products


def _of_adapter(w: World, share: float) -> Log:
    """A sampler with a share of the adapter, beside a trainer with all of it."""
    adapter, merged, products = _adapted(w)
    model = changed(w.fp32, lambda n, x: x + share * products[n] if n in products else None)
    lines = w.drawn(model=model.bfloat16())
    options = {"model": str(merged), "adapter": (str(adapter),)}
    return Log(w.both(lines, model=load(merged)), USUAL, options)


@plant("weights", "adapter missing")
def adapter_missing(w: World) -> Log:
    return _of_adapter(w, 0.0)


@plant("weights", "adapter scaled")
def adapter_of_another_scale(w: World) -> Log:
    return _of_adapter(w, w.uniform(0.3, 0.7))


# --- keys and values, positions ---


def _through(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor) -> torch.Tensor:
    most = 448.0
    return ((x.float() / scale).clamp(-most, most).to(dtype).float() * scale).to(x.dtype)


@plant("attention", "keys and values")
def scaled_fp8_cache(w: World) -> Log:
    """A scale of each layer from a calibration: that of its prompts."""
    return _sampler(
        w,
        cache=lambda c: AlteredCache(c, lambda x: _through(x, torch.float8_e4m3fn, x.abs().max() / 448.0)),
    )


@plant("attention", "keys and values")
def clipped_fp8_cache(w: World) -> Log:
    """A scale that is too small: large keys are clipped."""
    share = w.uniform(0.3, 0.5)

    def store(x: torch.Tensor) -> torch.Tensor:
        return _through(x, torch.float8_e4m3fn, x.abs().max() * share / 448.0)

    return _sampler(w, cache=lambda c: AlteredCache(c, store))


@plant("attention", "keys and values")
def int8_cache(w: World) -> Log:
    def store(x: torch.Tensor) -> torch.Tensor:
        scale = (x.float().abs().amax(-1, keepdim=True) / 127.0).clamp(min=1e-12)
        return ((x.float() / scale).round() * scale).to(x.dtype)

    return _sampler(w, cache=lambda c: AlteredCache(c, store))


@plant("attention", "rotary")
def another_rope_theta(w: World) -> Log:
    """A base that is in no list."""
    rope = dict(load(w.folder).config.rope_parameters)
    rope["rope_theta"] = float(round(rope["rope_theta"] * w.uniform(0.3, 0.6)))
    return _sampler(w, load(w.folder, torch.bfloat16, rope_parameters=rope))
