"""Adapters in PEFT's format: what is written is read to the bit, and other adapters are refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerokl.files.bitwise import count_unequal
from zerokl.files.writing import manifest_damage
from zerokl.model.adapters import AdapterLayout, adapted_layout
from zerokl.model.config import ModelConfig
from zerokl.model.families import FAMILIES
from zerokl.model.lora import TARGETS, Lora
from zerokl.model.peft import (
    CONFIG,
    WEIGHTS,
    checkpoint_config,
    read_adapter,
    read_adapter_config,
    stored_lora,
    write_adapter,
)
from zerokl.model.weights import Layout

from tests.helpers import randn

LORA = Lora(2, 6.0, ("q_proj", "down_proj"))
MODEL = ModelConfig.from_dict(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 40,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
)


def layout_of(lora: Lora) -> AdapterLayout:
    return AdapterLayout(adapted_layout(MODEL, lora), lora)


@pytest.fixture
def flat() -> torch.Tensor:
    flat = torch.zeros(layout_of(LORA).numel)
    for i, view in enumerate(layout_of(LORA).views(flat).values()):
        view.copy_(randn(i, *view.shape))
    return flat


@pytest.fixture
def folder(flat, tmp_path) -> Path:
    write_adapter(tmp_path / "adapter", layout_of(LORA), flat, "owner/base")
    return tmp_path / "adapter"


def alter(folder: Path, **changes: object) -> None:
    file = folder / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_what_is_written_is_read_again(folder, flat):
    assert count_unequal(read_adapter(folder, layout_of(LORA)), flat) == 0
    assert stored_lora(folder) == LORA
    assert read_adapter_config(folder).base == "owner/base"
    assert checkpoint_config(folder) == MODEL
    assert not manifest_damage(folder)
    tensors = load_file(folder / WEIGHTS)
    assert len(tensors) == 2 * 2 * 2
    assert tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"].shape == (2, 24)
    assert tensors["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"].shape == (24, 2)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_has_adapters_of_its_linear_weights_and_of_nothing_else(architecture):
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    family = FAMILIES[architecture]
    others = {"architectures": [architecture], **family.small}
    others["hidden_act"] = family.defaults.get("hidden_act", "silu")
    others |= experts if "Moe" in architecture else {}
    config = ModelConfig.from_dict(MODEL.raw | others)
    lora = Lora(2, 6.0)
    layout = AdapterLayout(adapted_layout(config, lora), lora)
    whole = Layout(config)
    shapes = {name: x.shape for name, x in whole.checkpoint_views(torch.empty(whole.numel)).items()}
    adapted = {f"{adapter.module}.weight" for adapter in layout.adapters}
    linear = ("_proj.weight", "_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")
    in_states = {name for name in shapes if ".linear_attn." in name}  # gated delta nets have no adapters
    assert adapted == {name for name in shapes if name.endswith(linear)} - in_states
    c, is_fused = config.experts, "fused_names" in config.values
    # The experts of gpt-oss are tensors without a module.
    matrices = 3 * (c.number + (c.shared > 0)) if c and architecture != "GptOssForCausalLM" else 0
    sparse = len(c.layers) if c else 0
    dense = 4 if is_fused else 4 + 3
    attention = 4 + bool(config.raw.get("q_lora_rank"))  # queries of a latent have two
    all_mixers = 2 * dense if not c else 2 * attention + sparse * matrices + (2 - sparse) * 3
    assert len(adapted) == all_mixers - 4 * len(config.states)
    for module, weight, rows, a, b in layout.adapters:
        assert (b.shape[0], a.shape[1]) == shapes[f"{module}.weight"]
        assert (a.shape[0], b.shape[1]) == (2, 2)
        assert (f"{module}.weight", rows.stop - rows.start) in weight.parts


def test_adapters_in_16_bits_are_read(folder, flat):
    tensors = {name: x.bfloat16() for name, x in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS)
    assert count_unequal(read_adapter(folder, layout_of(LORA)), flat.bfloat16().float()) == 0


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (LORA._replace(rank=3), r"lora: rank \(3\) must be 2, as in"),
        (LORA._replace(alpha=6.5), r"lora: alpha \(6.5\) must be 6, as in"),
        (
            LORA._replace(targets=("q_proj",)),
            "down_proj.lora_A.weight, which lora.targets and the model have",
        ),
        (
            LORA._replace(targets=("q_proj", "v_proj", "down_proj")),
            "lacks .*v_proj.lora_A.weight; set lora.targ",
        ),
    ],
)
def test_an_adapter_of_another_shape_is_refused(folder, other, message):
    with pytest.raises(ValueError, match=message):
        read_adapter(folder, layout_of(other))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, r"use_dora \(True\) is refused; only plain LoRA"),
        ({"use_rslora": True}, r"use_rslora \(True\) is refused; set it to false and lora_alpha to"),
        ({"lora_dropout": 0.05}, r"lora_dropout \(0.05\) is refused; set it to 0"),
        ({"bias": "all"}, "bias"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"a_setting_of_next_year": 1}, "a_setting_of_next_year"),
        ({"r": 0}, r"r \(0\) and lora_alpha"),
        ({"r": True}, r"r \(True\) and lora_alpha"),
        ({"lora_alpha": "x"}, r"lora_alpha \('x'\)"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_would_compute_something_else_is_refused_by_name(folder, changes, message):
    alter(folder, **changes)
    with pytest.raises(ValueError, match=f"lora: .*{message}"):
        read_adapter(folder, layout_of(LORA))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda name, x: (name, x.fill_(float("nan"))),
            r"lora_A\.weight holds 64 NaN or infinite numbers of 64",
        ),
        (lambda name, x: (name.removeprefix("base_model.model."), x), r"prefix: add base_model\.model\. in"),
        (lambda name, x: (f"_orig_mod.{name}", x), r"but for the prefix: drop _orig_mod\. in the names"),
    ],
    ids=["NaN", "no prefix", "a wrapper's prefix"],
)
def test_numbers_and_names_that_are_wrong_are_named(folder, change, message):
    tensors = load_file(folder / WEIGHTS)
    save_file(dict(change(name, x) for name, x in tensors.items()), folder / WEIGHTS)
    with pytest.raises(ValueError, match=message):
        read_adapter(folder, layout_of(stored_lora(folder)))


def test_names_of_a_state_dict_are_no_adapter(folder):
    tensors = {
        name.replace(".weight", ".default.weight"): x for name, x in load_file(folder / WEIGHTS).items()
    }
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ValueError, match=r"holds no adapter of q_proj.*first tensor is .*\.default\.weight"):
        stored_lora(folder)


@pytest.mark.parametrize("targets", [("q_proj", "o_proj"), ("up_proj",)])
def test_a_part_of_a_fused_matrix_has_no_adapter_of_its_own(targets):
    config = ModelConfig.from_dict(MODEL.raw | {"architectures": ["Phi3ForCausalLM"]})
    with pytest.raises(
        ValueError, match=r"targets has .*_proj, and a Phi3ForCausalLM holds .* as one tensor"
    ):
        adapted_layout(config, Lora(2, 6.0, targets))
    whole = AdapterLayout(adapted_layout(config, Lora(2, 6.0, TARGETS[:3])), Lora(2, 6.0, TARGETS[:3]))
    assert {adapter.module.split(".")[-1] for adapter in whole.adapters} == {"qkv_proj"}


def test_damage_is_named(folder, tmp_path):
    tensors = load_file(folder / WEIGHTS)
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name].double()}, folder / WEIGHTS)
    with pytest.raises(ValueError, match=f"{name} is .* float64|{name} is .*torch.float64"):
        read_adapter(folder, layout_of(LORA))
    (folder / WEIGHTS).write_bytes(b"x")
    for read in (lambda: read_adapter(folder, layout_of(LORA)), lambda: stored_lora(folder)):
        with pytest.raises(ValueError, match="missing, corrupt or incomplete"):
            read()
    (folder / CONFIG).write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        read_adapter_config(folder)
    (folder / CONFIG).unlink()
    with pytest.raises(ValueError, match=r"holds no adapter_config\.json; give the folder of a PEFT adapter"):
        read_adapter_config(folder)
