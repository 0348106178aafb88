"""No key of a config.json is passed over: it is read, or listed as one that computes nothing, or refused."""

from itertools import product
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig
from zerokl.model.config import ModelConfig
from zerokl.model.families import MODEL_TYPES

# Sizes that fit, for the fields that a family has no default for.
SIZES = {"head_dim": 32, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
# Fields without a default.
REQUIRED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "rms_norm_eps", "num_local_experts"),
)
# Values that no model has, or that ask for what no family computes.
MUTATED: dict[str, Any] = {
    "hidden_act": "relu",
    "attention_dropout": 0.1,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256,
    "clip_qkv": 8.0,
    "layer_types": ["sliding_attention"],
    "num_nextn_predict_layers": 1,
    "vision_config": {"hidden_size": 64},
    "a key of next year": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "a key of next year": 1},
    "is_encoder_decoder": True,
}


# The family's files have layers of multi-token prediction, which no log-probability depends on. Others read
# what no other family computes.
PASSED_OVER = {(x, "num_nextn_predict_layers") for x in ("glm4_moe", "glm4_moe_lite", "deepseek_v3")}
PASSED_OVER |= {("gemma3_text", "query_pre_attn_scalar")}
PASSED_OVER |= {("gemma2", key) for key in MUTATED if key.endswith(("softcapping", "scalar"))}
# Heads of transformers' default are 42 wide, which no model has.
LATENT = "deepseek_v2", "deepseek_v3", "glm4_moe_lite"
WIDER_HEADS = {key: {"num_attention_heads": 4} for key in LATENT} | {"glm4_moe": {"num_attention_heads": 64}}


# Fields that follow from those of the small model.
DECIDED = dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), ("layer_types",))


def default_config(model_type: str, **fields: Any) -> PretrainedConfig:
    """transformers' default of a family, but for what every model of the family that zerokl takes has."""
    fields = WIDER_HEADS.get(model_type, {}) | dict(MODEL_TYPES[model_type].small) | fields
    return AutoConfig.for_model(model_type, **fields)


def as_file(model_type: str, config: PretrainedConfig) -> dict[str, Any]:
    return config.to_dict() | {"architectures": [MODEL_TYPES[model_type].architecture]}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_default_config_of_transformers_is_taken(model_type):
    """Whole, as a module has it, and as save_pretrained writes it."""
    config = default_config(model_type, pad_token_id=None)
    whole = ModelConfig.from_dict(as_file(model_type, config))
    written = config.to_diff_dict() | {"architectures": [MODEL_TYPES[model_type].architecture]}
    assert ModelConfig.from_dict(written) == whole


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_field_that_is_missing_is_what_transformers_takes(model_type):
    """Each field in turn is taken out of a file of defaults. Sizes must be there."""
    raw = as_file(model_type, default_config(model_type))
    whole, left_out = ModelConfig.from_dict(raw), []
    for name in raw:
        less = {key: value for key, value in raw.items() if key != name}
        if name not in {
            "architectures",
            *MODEL_TYPES[model_type].small,
            *REQUIRED,
            *DECIDED.get(model_type, ()),
        }:
            assert ModelConfig.from_dict(less).values == whole.values, name
            left_out.append(name)
    named = {"rope_parameters", "tie_word_embeddings", "hidden_act"} & raw.keys()
    assert named - MODEL_TYPES[model_type].small.keys() <= set(left_out)


@pytest.mark.parametrize(
    ("model_type", "key"), [pair for pair in product(MODEL_TYPES, MUTATED) if pair not in PASSED_OVER]
)
def test_a_key_that_changes_the_computation_is_refused_by_name(model_type, key):
    sizes = SIZES | ({"num_key_value_heads": 4, "head_dim": 16} if model_type in LATENT else {})
    raw = as_file(model_type, default_config(model_type, **sizes)) | {key: MUTATED[key]}
    with pytest.raises(ValueError, match="is not supported") as error:
        ModelConfig.from_dict(raw)
    assert key in str(error.value) or "sliding" in str(error.value)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_control_a_key_that_computes_nothing_is_passed(model_type):
    raw = as_file(model_type, default_config(model_type))
    more = {"unsloth_version": "2026.1", "a key of next year": None, "use_cache": False, "top_p": 0.9}
    assert ModelConfig.from_dict(raw | more) == ModelConfig.from_dict(raw)


# What published checkpoints have beside what transformers writes: SmolLM2, Qwen2.5, a Llama, SmolLM3.
PUBLISHED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"_model_name_or_path": "a run", "is_llama_config": True, "rope_interleaved": False}),
    ("llama", {"unsloth_fixed": True, "transformers.js_config": {"kv_cache_dtype": {}}, "pretraining_tp": 1}),
    ("qwen2", {"use_mrope": False, "max_window_layers": 28, "sliding_window": 32768}),
    ("smollm3", {"pretraining_tp": 2, "max_window_layers": 28, "use_sliding_window": False}),
    ("gemma2", {"cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh"}),
    ("gemma3_text", {"cache_implementation": "hybrid", "attn_logit_softcapping": None, "rope_scaling": None}),
    ("gpt_oss", {"experts_per_token": 2, "initial_context_length": 64, "router_aux_loss_coef": 0.9}),
    ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}),
    ("olmo3", {"rope_scaling": None, "use_cache": False}),
    ("phi3", {"auto_map": {"AutoConfig": "a.b"}, "embd_pdrop": 0.0, "_name_or_path": "Phi-3"}),
]


@pytest.mark.parametrize(("model_type", "more"), PUBLISHED)
def test_control_what_published_checkpoints_say_beside_is_passed(model_type, more):
    raw = as_file(model_type, default_config(model_type))
    assert ModelConfig.from_dict(raw | more) == ModelConfig.from_dict(raw)
