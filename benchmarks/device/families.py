"""Every family at the widths of a published model, two layers of it: the law, and runs that are exact.

Each family has a process of its own, and the processes of a part run at once, because most of their time goes
to compiling. Three dtypes each: the law (exactness.py), then a run with the native sampler, whose logprobs
are compared with the trainer's, and a second run of one fingerprint. Mixtures have fewer experts than the
published ones, of the same width. The layers are two, one of each kind where a model has two.
"""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from zerokl.benchmarks.device.processes import module_command, rows_of, serve
from zerokl.benchmarks.device.runs import settings, take_steps, write_decoder
from zerokl.benchmarks.device.vllm_runs import DTYPES
from zerokl.benchmarks.exactness import LENGTHS, law
from zerokl.benchmarks.machine import Machine, Row
from zerokl.engine.runs.init import preset_config
from zerokl.model.config import ModelConfig

# hidden_size, intermediate_size, num_attention_heads, num_key_value_heads, head_dim of config.json.
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_BOTH_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
# Of Qwen3.5 and Qwen3-Next, but for the number of experts: a layer with a gated delta net, and a full one.
_DELTA_NET = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "partial_rotary_factor": 0.25,
}
_HYBRID_EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_Widths = tuple[tuple[int, ...], dict[str, object]]
# model_type -> the sizes of a published model, and further fields. Windows are short, so that the sequences
# here are longer.
DENSE: dict[str, _Widths] = {
    "gemma": ((2048, 16384, 8, 1, 256), {}),  # 2B
    "gemma2": (  # 2B
        (2304, 9216, 8, 4, 256),
        {
            "sliding_window": 32,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": ((1152, 6912, 4, 1, 256), {"sliding_window": 32, "query_pre_attn_scalar": 256}),  # 1B
    "granite": ((2048, 8192, 32, 8, 64), {}),  # 3.3 2B
    "llama": ((2048, 8192, 32, 8, 64), {}),  # 3.2 1B
    "mistral": ((4096, 14336, 32, 8, 128), {}),  # 7B
    "olmo2": ((2048, 8192, 16, 16, 128), {}),  # 1B
    "olmo3": ((4096, 11008, 32, 32, 128), {"sliding_window": 32, **_BOTH_KINDS}),  # 7B
    "phi3": ((3072, 8192, 24, 8, 128), {}),  # Phi-4-mini
    "qwen2": ((896, 4864, 14, 2, 64), {}),  # 2.5 0.5B
    "qwen3": ((1024, 3072, 16, 8, 128), {}),  # 0.6B
    "qwen3_5_text": ((4096, 12288, 16, 4, 256), _DELTA_NET),  # 3.5 9B
    "smollm3": ((2048, 11008, 16, 4, 128), {}),  # 3B
}
MIXTURES: dict[str, _Widths] = {
    "glm4_moe": ((4096, 10944, 96, 8, 128), {"moe_intermediate_size": 1408}),  # GLM-4.5-Air
    "gpt_oss": (  # 20B
        (2880, 2880, 64, 8, 64),
        {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 32, **_BOTH_KINDS},
    ),
    "mixtral": ((4096, 14336, 32, 8, 128), {"num_local_experts": 3}),  # 8x7B
    "qwen2_moe": (  # Qwen1.5-MoE-A2.7B
        (2048, 5632, 16, 16, 128),
        {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    ),
    "qwen3_5_moe_text": ((2048, 5632, 16, 2, 256), _DELTA_NET | _HYBRID_EXPERTS),  # 3.5 35B-A3B
    "qwen3_moe": ((2048, 6144, 32, 4, 128), {"moe_intermediate_size": 768}),  # 30B-A3B
    "qwen3_next": ((2048, 5632, 16, 2, 256), _DELTA_NET | _HYBRID_EXPERTS),  # 80B-A3B
}
# No GPU computes them (ModelConfig.refuse_on_triton).
NOT_ON_A_GPU = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
_TOY = (64, 128, 4, 2, 16)


def dense(m: Machine) -> Iterator[Row]:
    """Families with one MLP in each layer; and the names of those that no GPU computes."""
    for name in NOT_ON_A_GPU:
        yield {"what": f"{name}: not compared (it has no kernels for a GPU)"}
    yield from _in_processes(m, DENSE)


def mixtures(m: Machine) -> Iterator[Row]:
    """Families with experts."""
    return _in_processes(m, MIXTURES)


def _in_processes(m: Machine, families: Mapping[str, _Widths]) -> Iterator[Row]:
    jobs = {name: module_command(m, "device.families", name) for name in families}
    return rows_of(m, jobs, m.left_s())


def family_config(name: str, is_small: bool) -> ModelConfig:
    """Two layers of a family, at the widths of a published model, or toy ones."""
    widths, fields = (DENSE | MIXTURES)[name]
    fields = {k: v for k, v in fields.items() if k == "layer_types"} if is_small else fields
    sizes = dict(zip(_SIZES, _TOY if is_small else widths, strict=True))
    return preset_config(name, 128 if is_small else 4096, {**sizes, "num_hidden_layers": 2, **fields})


def _runs(m: Machine, name: str) -> Iterator[Row]:
    """In a process of its own: the law and the runs of one family, in each dtype."""
    config, lengths = family_config(name, m.small), (9, 13) if m.small else LENGTHS
    for dtype in DTYPES:
        what = f"{name} {dtype}"
        yield from law(m.random_decoder(config, getattr(torch, dtype)), f"law {what}", lengths)
        with tempfile.TemporaryDirectory() as folder:
            model = write_decoder(m.random_decoder(config, torch.float32), Path(folder))
            values = settings(m, model, getattr(torch, dtype), 2)
            first, second = take_steps(values), take_steps(values)
        yield from second.beside(first, what)


SECTIONS = (dense, mixtures)

if __name__ == "__main__":
    serve(_runs)
