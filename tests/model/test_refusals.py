"""A model that the decoder cannot compute, or a folder that is not whole, is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerokl.engine.runs.init import preset_config
from zerokl.files.bitwise import equal
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import check_values, check_weights, load_decoder, read_rows
from zerokl.model.config import ModelConfig
from zerokl.model.scoring import logprobs, pack
from zerokl.model.weights import Layout

from tests.model.checkpoints import save_random

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}


def test_control_the_config_without_changes_is_accepted():
    assert ModelConfig.from_dict(QWEN2).values["qkv_bias"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' is not supported"),
        ({"architectures": None}, "architecture None is not supported"),
        ({"rope_scaling": {"rope_type": "su", "factor": 4.0}}, "rope_type = 'su' is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, r"linear: factor \(0.0\) must be positive"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling lacks the field factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta": 1}}, "rope_scaling: beta = 1 is not supp"),
        ({"rope_scaling": {"type": "yarn", "factor": "2"}}, r"factor \('2'\) must be a finite number"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "full_attention = .* is not supported",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}}
            | {"original_max_position_embeddings": 64},
            r"'longrope' is not supported; with max_position_embeddings \(512\) above .* factor to 8",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 7, "long_factor": [2.0] * 8}},
            r"longrope: short_factor has 7 numbers, and 8 frequencies are rotated",
        ),
        ({"logits_scaling": 8.0}, "logits_scaling = 8.0 is not supported; it may change what the model"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        (
            {"use_sliding_window": True, "sliding_window": 4096},
            "sliding window attention = 4096 is not supported",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding window attention"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config = 'fp8' is not supported"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1 is not supported"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2 is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        (
            {"num_attention_heads": 3, "head_dim": 16},
            r"num_attention_heads \(3\) must be a multiple of num_key_value_heads \(2\)",
        ),
        ({"head_dim": 24}, r"head_dim \(24\) must be a multiple of 16"),
        ({"vocab_size": "many"}, r"vocab_size \('many'\) must be a positive whole number"),
        ({"vocab_size": True}, r"vocab_size \(True\) must be a positive whole number"),
        ({"head_dim": 0}, r"head_dim \(0\) must be a positive whole number"),
        ({"tie_word_embeddings": "no"}, r"tie_word_embeddings \('no'\) must be true or false"),
        ({"rope_parameters": [1]}, r"rope_parameters \(\[1\]\) must be an object"),
        ({"rope_theta": "many"}, r"rope_theta \('many'\) must be a finite number"),
        *[
            ({name: None}, rf"lacks the field {name}")
            for name in QWEN2
            if name not in ("architectures", "num_key_value_heads")
        ],
    ],
)
def test_unsupported_config_is_refused(change, message):
    # A change to None removes the field.
    raw = {name: value for name, value in (QWEN2 | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(raw)


MISTRAL = QWEN2 | {"architectures": ["MistralForCausalLM"]}


@pytest.mark.parametrize("window", [{"sliding_window": 4096}, {}], ids=["set", "transformers' default"])
def test_a_mistral_with_a_sliding_window_is_refused(window):
    assert ModelConfig.from_dict(MISTRAL | {"sliding_window": None}).head_dim == 16
    with pytest.raises(ValueError, match="sliding_window = 4096 is not supported"):
        ModelConfig.from_dict(MISTRAL | window)


def test_a_bias_of_a_family_without_one_is_refused():
    with pytest.raises(ValueError, match="attention_bias = True is not supported; a MistralForCausalLM has"):
        ModelConfig.from_dict(MISTRAL | {"sliding_window": None, "attention_bias": True})


QWEN3_MOE = QWEN2 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({}, [0, 1]),
        ({"decoder_sparse_step": 2}, [1]),
        ({"mlp_only_layers": [1]}, [0]),
        ({"num_experts": None, "num_local_experts": 8}, [0, 1]),
        ({"shared_expert_intermediate_size": 0, "scoring_func": "softmax"}, [0, 1]),
    ],
)
def test_the_layers_of_the_experts_are_those_of_the_config(change, layers):
    config = ModelConfig.from_dict(QWEN3_MOE | change)
    assert [i for i, layer in enumerate(config.blocks) if "experts" in layer[1].block.values] == layers
    assert config.experts.number == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size = 64 is not supported"),
        ({"n_shared_experts": 1}, "n_shared_experts = 1 is not supported"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' is not supported; only experts that a soft"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor = 2.5 is not supported"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) must be at most num_experts \(8\)"),
        ({"num_experts": 0}, r"num_experts \(0\) must be a positive whole number"),
        ({"num_experts": None}, "lacks the field num_experts"),
        ({"moe_intermediate_size": None}, "lacks the field moe_intermediate_size"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers \(1000000000\) must be at most 4096"),
        ({"num_hidden_layers": 4096, "num_experts": 512}, r"num_experts \(512\) in 4096 layers are more"),
        ({"mlp_only_layers": 3}, r"mlp_only_layers \(3\) must be a list"),
        ({"norm_topk_prob": "yes"}, r"norm_topk_prob \('yes'\) must be true or false"),
    ],
)
def test_other_mixtures_of_experts_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(QWEN3_MOE | change)


QWEN2_MOE = QWEN3_MOE | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "shared_expert_intermediate_size": 32,
}
MIXTRAL = QWEN2 | {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_theta": 1e6,
}

GLM4_MOE = QWEN2 | {
    "architectures": ["Glm4MoeForCausalLM"],
    "head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}


DEEPSEEK_V2 = GLM4_MOE | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "num_key_value_heads": None,
    "head_dim": None,
    "qk_rope_head_dim": 16,
    "topk_method": "group_limited_greedy",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (DEEPSEEK_V2 | {"norm_topk_prob": True}, "norm_topk_prob = True is not supported; only False"),
        (DEEPSEEK_V2 | {"topk_method": "noaux_tc"}, "only greedy and group_limited_greedy is"),
        (
            DEEPSEEK_V2 | {"scoring_func": "sigmoid"},
            "scoring_func = 'sigmoid' is not supported; only softmax",
        ),
        (
            DEEPSEEK_V2 | {"topk_method": "greedy", "n_group": 2},
            r"n_group \(2\) must be 1 with topk_method greedy",
        ),
        (DEEPSEEK_V2 | {"rope_interleave": False}, "rope_interleave = False is not supported"),
        (QWEN2_MOE | {"n_shared_experts": 1}, "n_shared_experts = 1 is not supported"),
        (
            QWEN2_MOE | {"shared_expert_intermediate_size": 0},
            r"shared_expert_intermediate_size \(0\) must be a positive",
        ),
        (QWEN2_MOE | {"shared_expert_intermediate_size": None}, "lacks the field shared_expert_intermediate"),
        (MIXTRAL | {"sliding_window": 4096}, "sliding_window = 4096 is not supported"),
        (MIXTRAL | {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1 is not supported"),
        (MIXTRAL | {"num_local_experts": None}, "lacks the field num_experts"),
        (MIXTRAL | {"num_experts": 8}, "num_experts and num_local_experts differ"),
        (GLM4_MOE | {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported; only sigmoid"),
        (GLM4_MOE | {"topk_method": "greedy"}, "topk_method = 'greedy' is not supported; only noaux_tc"),
        (GLM4_MOE | {"n_group": 3}, r"n_group \(3\) must divide n_routed_experts \(8\)"),
        (GLM4_MOE | {"n_group": 8}, r"n_group \(8\) must divide n_routed_experts \(8\) into groups of at"),
        (GLM4_MOE | {"n_group": 2, "topk_group": 3}, r"topk_group \(3\) be at most n_group"),
        (
            GLM4_MOE | {"n_group": 4, "num_experts_per_tok": 3},
            r"num_experts_per_tok \(3\) must be at most the 2",
        ),
        (GLM4_MOE | {"n_routed_experts": None}, "lacks the field n_routed_experts"),
        (GLM4_MOE | {"n_shared_experts": None}, "lacks the field n_shared_experts"),
        (GLM4_MOE | {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1 is not supported"),
        (GLM4_MOE | {"partial_rotary_factor": 1.5}, r"partial_rotary_factor \(1.5\) must be above 0"),
        (
            GLM4_MOE | {"partial_rotary_factor": 0.01},
            r"the rotated part of a head \(0\) must be 2 or more, and even",
        ),
    ],
)
def test_what_a_family_with_experts_does_not_compute_is_refused(change, message):
    raw = {name: value for name, value in change.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(raw)


GEMMA2 = QWEN2 | {"architectures": ["Gemma2ForCausalLM"], "head_dim": 16, "hidden_act": "gelu_pytorch_tanh"}
GEMMA3, OLMO3 = (GEMMA2 | {"architectures": [f"{name}ForCausalLM"]} for name in ("Gemma3", "Olmo3"))
OLMO3 = OLMO3 | {"hidden_act": "silu"}
ROPES = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 2e4}}


# In the form of the published files.
GPT_OSS = QWEN2 | {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (GEMMA2 | {"layer_types": ["full_attention"]}, "layer_types = .*num_hidden_layers is 2"),
        (
            GEMMA2 | {"layer_types": ["full_attention", "chunked_attention"]},
            "only full_attention and sliding_attention is",
        ),
        (GEMMA2 | {"sliding_window": 0}, r"sliding_window \(0\) must be a positive whole number"),
        (
            GEMMA2 | {"attn_logit_softcapping": -1.0},
            "attn_logit_softcapping = -1.0 is not supported",
        ),
        (GEMMA2 | {"final_logit_softcapping": True}, "final_logit_softcapping = True is not supported"),
        (GEMMA2 | {"query_pre_attn_scalar": 0}, r"query_pre_attn_scalar \(0.0\) must be positive"),
        (GEMMA2 | {"rope_parameters": ROPES}, "full_attention = .* is not supported"),
        (GEMMA3 | {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported"),
        (
            GEMMA3 | {"use_bidirectional_attention": True},
            "use_bidirectional_attention = True is not supported",
        ),
        (GEMMA3 | {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters = .* must have an object each"),
        (
            GEMMA3 | {"rope_parameters": ROPES | {"sliding_attention": {"rope_type": "linear"}}},
            "sliding_attention: rope_type = 'linear' is not supported",
        ),
        (
            GEMMA3 | {"rope_parameters": ROPES | {"sliding_attention": {"beta": 1}}},
            "sliding_attention: beta = 1 is not supported",
        ),
        (OLMO3 | {"rope_theta": 1e4}, r"rope_theta \(10000\): in layers of sliding_attention"),
        (GPT_OSS | {"experts_per_token": 3}, "experts_per_token = 3 is not supported; 2 is what"),
        (GPT_OSS | {"initial_context_length": 4096}, "initial_context_length = 4096 is not supported"),
        (GPT_OSS | {"rope_scaling": None}, "rope_parameters and rope_scaling are missing"),
        (GPT_OSS | {"swiglu_limit": 0.0}, r"swiglu_limit \(0.0\) must be positive"),
        (GPT_OSS | {"n_shared_experts": 1}, "n_shared_experts = 1 is not supported"),
        (GPT_OSS | {"norm_topk_prob": False}, "norm_topk_prob = False is not supported"),
    ],
)
def test_what_a_family_with_windows_does_not_compute_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(change)


def test_a_null_window_of_layers_that_slide_is_refused():
    with pytest.raises(ValueError, match="sliding_window is null, and layers are of sliding_attention"):
        ModelConfig.from_dict(OLMO3 | {"sliding_window": None})


def test_what_no_gpu_computes_is_refused_by_name():
    message = r'device \("cuda"\): the latent attention of a DeepseekV3ForCausalLM is not .*cpu'
    with pytest.raises(ValueError, match=message):
        preset_config("deepseek_v3", 40).refuse_on_triton()
    preset_config("qwen3_5_text", 40).refuse_on_triton()
    for raw in (QWEN2, GEMMA2, OLMO3, GPT_OSS):
        ModelConfig.from_dict(raw).refuse_on_triton()


def test_windows_caps_and_rotations_are_those_of_the_config():
    """Also under the names of older files."""
    gemma2 = ModelConfig.from_dict(GEMMA2 | {"final_logit_softcapping": None})
    assert (gemma2.values["window"], gemma2.values["cap"], gemma2.head.cap) == ([4096, 0], 50.0, 0.0)
    older = GEMMA3 | {"sliding_window_pattern": 2, "rope_theta": 1e6, "rope_local_base_freq": 2e4}
    newer = GEMMA3 | {"layer_types": ["sliding_attention", "full_attention"], "rope_parameters": ROPES}
    for raw in (older, newer):
        config = ModelConfig.from_dict(raw)
        assert (config.rope_theta, config.local_rope_thetas) == (1e6, (2e4, None))
        assert config.rotating(0).frequencies != config.frequencies == config.rotating(1).frequencies
    whole = ModelConfig.from_dict({k: v for k, v in older.items() if not k.startswith("rope")})
    assert (whole.rope_theta, whole.local_rope_thetas) == (1e6, (1e4, None))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
            | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "differs from rope_parameters",
        ),
        (
            {"rope_theta": 1.0, "rope_scaling": YARN},
            r"rope_theta \(1.0\) must be above 1 with rope_type yarn",
        ),
    ],
)
def test_a_rotation_that_libraries_read_otherwise_or_nobody_computes_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(QWEN2 | change)


@pytest.mark.parametrize(("truncate", "read"), [({}, True), ({"truncate": None}, False)])
def test_a_null_for_truncate_is_no_truncation_as_in_transformers(truncate, read):
    assert ModelConfig.from_dict(QWEN2 | {"rope_scaling": YARN | truncate}).rope_scaling["truncate"] is read


QWEN3_5 = {
    **QWEN2,
    "architectures": ["Qwen3_5ForCausalLM"],
    "head_dim": 32,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim = 3 is not supported; only 4 is"),
        ({"attn_output_gate": False}, "attn_output_gate = False is not supported; only true is"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype = 'bfloat16' is not supported; the state is in"),
        ({"linear_num_value_heads": 3}, r"linear_num_value_heads \(3\) must be a multiple of linear_num_key"),
        ({"full_attention_interval": 4}, r"layer_types = .* is not supported; num_hidden_layers \(2\)"),
        ({"layer_types": ["full_attention"]}, "with one of full_attention at least"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding window attention"),
        ({"mtp_num_hidden_layers": 1}, "mtp_num_hidden_layers = 1 is not supported"),
        ({"vision_config": {"depth": 1}}, "vision_config = .* is not supported"),
        (
            {"architectures": ["Qwen3_5ForConditionalGeneration"]},
            "Qwen3_5ForConditionalGeneration' is not su",
        ),
    ],
)
def test_what_a_hybrid_does_not_compute_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(QWEN3_5 | change)


def test_control_a_hybrid_is_accepted_with_what_published_files_have():
    more = {"attn_output_gate": True, "mamba_ssm_dtype": "float32"}
    rope = {
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 2],
        "rope_type": "default",
    }
    config = ModelConfig.from_dict(QWEN3_5 | more | {"rope_parameters": rope | {"mrope_interleaved": True}})
    assert config.states.keys() == {0}
    assert config.rotary_dim == 8


def test_control_the_families_with_experts_are_accepted_with_what_they_read():
    assert ModelConfig.from_dict(MIXTRAL).values["experts"] == {
        "number": 4,
        "per_token": 2,
        "size": 96,
        "renormalise": True,
        "layers": [0, 1],
    }
    experts = ModelConfig.from_dict(QWEN2_MOE | {"decoder_sparse_step": 2}).values["experts"]
    assert (experts["layers"], experts["shared"], experts["shared_gate"]) == ([1], 32, True)
    assert not experts["renormalise"]
    glm = ModelConfig.from_dict(GLM4_MOE | {"n_group": 2, "routed_scaling_factor": 2.5})
    assert glm.values["experts"] == {
        "number": 8,
        "per_token": 2,
        "size": 32,
        "renormalise": True,
        "layers": [1],
        "shared": 64,
        "sigmoid": {"groups": 2, "top_groups": 1, "scale": 2.5},
    }
    assert glm.values["rotary_dim"] == 16


def test_layers_that_guess_tokens_ahead_are_passed_over_where_the_config_has_them(tmp_path):
    folder = save_random("glm4_moe", tmp_path)
    expected = load_decoder(folder, torch.float32).flat
    _set("model.layers.2.eh_proj.weight", torch.full((3,), float("nan")))(folder)
    assert equal(load_decoder(folder, torch.float32).flat.detach(), expected.detach())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ValueError, match=r"holds model\.layers\.2\.eh_proj\.weight"):
        load_decoder(folder, torch.float32)


def _edit(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


def _one_bad_number(kind: str, bad: float) -> Callable[[Path], None]:
    """In the last number of the first tensor with this in its name."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        next(x for name, x in tensors.items() if kind in name).view(-1)[-1] = bad

    return _edit(change)


def _rename(change: Callable[[str], str]) -> Callable[[Path], None]:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        renamed = {change(name): x for name, x in tensors.items()}
        tensors.clear()
        tensors.update(renamed)

    return _edit(rename)


def _set(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return _edit(lambda tensors: tensors.update({name: tensor}))


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


SINGLE = {
    "no config": (lambda f: (f / "config.json").unlink(), "holds no config.json"),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "config.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no model.safetensors"),
    "corrupt": (
        lambda f: (f / "model.safetensors").write_bytes(b"not tensors" * 50),
        "model.safetensors is corrupt",
    ),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors is corrupt"),
    "truncated": (_truncate, "model.safetensors is corrupt or incomplete"),
    "tensor missing": (
        _edit(lambda tensors: tensors.pop("model.norm.weight")),
        "lacks 1 weights, the first being model.norm.weight",
    ),
    "tensor left over": (_set("model.layers.2.extra", torch.zeros(3)), "holds model.layers.2.extra"),
    "wrong shape": (
        _set("model.norm.weight", torch.zeros(65)),
        r"model.norm.weight has shape \(65,\), config.json asks for \(64,\)",
    ),
    "wrong dtype": (
        _set("model.norm.weight", torch.zeros(64, dtype=torch.int8)),
        "dtype torch.int8, which is not supported",
    ),
    "a NaN": (
        _one_bad_number("layers.1.mlp.up_proj", float("nan")),
        r"model\.layers\.1\.mlp\.up_proj\.weight holds 1 NaN or infinite numbers of 6144",
    ),
    "an infinity": (_one_bad_number("model.norm", float("-inf")), r"model\.norm\.weight holds 1 NaN or inf"),
    "a wrapper's prefix": (
        _rename(lambda name: f"module._orig_mod.{name}"),
        r"; it is \S+ but for the prefix: drop module\._orig_mod\. in",
    ),
    "no prefix": (_rename(lambda name: name.removeprefix("model.")), r"but for the prefix: add model\. in"),
    "an index beside it": (
        lambda f: _index(f).write_text('{"weight_map": {}}'),
        r"holds model\.safetensors and model\.safetensors\.index\.json",
    ),
}


@pytest.mark.parametrize("case", SINGLE)
def test_damaged_folder_is_refused(case, tmp_path):
    damage, message = SINGLE[case]
    folder = save_random("qwen2", tmp_path)
    load_decoder(folder, torch.float32)
    damage(folder)
    with pytest.raises(ValueError, match=message):
        load_decoder(folder, torch.float32)


def _index(folder: Path) -> Path:
    return folder / "model.safetensors.index.json"


def _name_twice(folder: Path) -> None:
    """Make the index claim a tensor for a shard that does not hold it."""
    index = json.loads(_index(folder).read_text())
    files = sorted(set(index["weight_map"].values()))
    name = next(n for n, file in index["weight_map"].items() if file == files[0])
    index["weight_map"][name] = files[-1]
    _index(folder).write_text(json.dumps(index))


def _list_one_less(folder: Path) -> None:
    """Store a tensor twice; the index names one of them."""
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor}, second)


SHARDED = {
    "shard missing": (
        lambda f: sorted(f.glob("*.safetensors"))[1].unlink(),
        r"model-00002-of-\d+.safetensors is missing",
    ),
    "shard corrupt": (
        lambda f: sorted(f.glob("*.safetensors"))[1].write_bytes(b"x" * 99),
        r"model-00002-of-\d+.safetensors is corrupt",
    ),
    "index is not JSON": (lambda f: _index(f).write_text("{"), "index.json is not a valid index"),
    "index without a map": (lambda f: _index(f).write_text("{}"), "index.json is not a valid index"),
    "index is a list": (lambda f: _index(f).write_text("[]"), "index.json is not a valid index"),
    "map is a list": (
        lambda f: _index(f).write_text('{"weight_map": []}'),
        "index.json is not a valid index",
    ),
    "tensor in another shard": (_name_twice, "safetensors is corrupt or incomplete"),
    "tensor of no shard's list": (_list_one_less, "which the folder's index does not name there"),
}


@pytest.mark.parametrize("case", SHARDED)
def test_damaged_shards_are_refused(case, tmp_path):
    damage, message = SHARDED[case]
    folder = save_random("qwen2", tmp_path, shard="100KB")
    load_decoder(folder, torch.float32)
    damage(folder)
    with pytest.raises(ValueError, match=message):
        load_decoder(folder, torch.float32)


def test_a_router_that_is_nan_is_refused_by_every_reader(tmp_path):
    folder = save_random("qwen3_moe", tmp_path)
    layout = Layout(ModelConfig.from_file(folder))
    readers = (
        lambda: load_decoder(folder, torch.bfloat16),
        lambda: check_values(folder),
        lambda: read_rows(folder, layout, {name: slice(None) for name in layout.checkpoint_views(empty)}),
    )
    empty = torch.empty(layout.numel, device="meta")
    for read in readers:
        read()
    _edit(lambda tensors: tensors["model.layers.1.mlp.gate.weight"].fill_(float("nan")))(folder)
    for read in readers:
        with pytest.raises(ValueError, match=r"mlp\.gate\.weight holds 384 NaN or infinite numbers of 384"):
            read()


@pytest.mark.parametrize("shard", ["1GB", "20KB"], ids=["single", "sharded"])
def test_a_tied_head_that_differs_from_the_embedding_is_refused(shard, tmp_path):
    """Beside the head that is equal (test_checkpoint.py). With tie_word_embeddings false both are read."""
    folder = save_random("qwen2", tmp_path, shard=shard)
    config, layout = json.loads((folder / "config.json").read_text()), Layout(ModelConfig.from_file(folder))
    head = load_decoder(folder, torch.float32).w["lm_head"]
    assert not equal(head.detach(), load_decoder(folder, torch.float32).w["embed"].detach())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tied = Layout(ModelConfig.from_file(folder))
    assert tied.numel < layout.numel
    for read in (load_decoder, lambda folder, _: check_weights(folder, tied)):
        with pytest.raises(
            ValueError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight.* false"
        ):
            read(folder, torch.float32)


@pytest.mark.parametrize("pair", [([], [1]), ([1], [])])
def test_sequence_without_prompt_or_completion_is_refused(pair):
    with pytest.raises(ValueError, match=r"sequence 1 has \d prompt and \d completion tokens"):
        pack([([1], [2]), pair])


def test_sequence_longer_than_the_context_is_refused(tmp_path):
    decoder = load_decoder(save_random("llama", tmp_path), torch.float32)
    with pytest.raises(ValueError, match=r"sequence of 513 tokens is longer than the context \(512\)"):
        logprobs(decoder, pack([([1], [2] * 513)]), SamplingParams())
