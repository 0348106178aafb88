"""Patterns of names freeze whole weights; what they miss, cut in two or leave nothing of is refused."""

import pytest
from zerokl.model.config import ModelConfig
from zerokl.model.freezing import frozen_weights

RAW = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 11,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
}
FIRST_LAYER = ["down", "gate_up", "input_norm", "k_norm", "o", "post_norm", "q_norm", "qkv"]


def frozen(*patterns: str, tied: bool = False) -> list[str]:
    return sorted(frozen_weights(ModelConfig.from_dict(RAW | {"tie_word_embeddings": tied}), patterns))


@pytest.mark.parametrize(
    ("patterns", "weights"),
    [
        ([], []),
        (["model.embed_tokens.*"], ["embed"]),
        (["model.layers.0.*"], [f"layers.0.{name}" for name in FIRST_LAYER]),
        (["model.layers.1.*norm.weight"], [f"layers.1.{n}" for n in FIRST_LAYER if n.endswith("norm")]),
        (["*.3.self_attn.[qkv]_proj.weight", "model.norm.weight"], ["layers.3.qkv", "norm"]),
        (["*.3.mlp.gate_proj.*", "*.3.mlp.up_proj.*"], ["layers.3.gate_up"]),
    ],
)
def test_patterns_freeze_what_they_match(patterns, weights):
    assert frozen(*patterns) == weights


@pytest.mark.parametrize("pattern", ["lm_head.*", "model.embed_tokens.weight"])
def test_a_tied_lm_head_is_the_embedding(pattern):
    assert frozen(pattern, tied=True) == ["embed"]
    assert len(frozen("lm_head.*")) == len(frozen("model.embed_tokens.*")) == 1
    assert frozen("lm_head.*") != frozen("model.embed_tokens.*"), "control: without ties there are two"


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            ["model.layers.0.*", "model.embed_token.*"],
            "frozen ('model.embed_token.*'): matches no weight of ",
        ),
        (["model.layer.0.*"], "; did you mean 'model.layers.0.*'?"),
        (["model.embed_tokens.wieght"], "; did you mean 'model.embed_tokens.weight'?"),
        ([""], "frozen (''): matches no weight of the model; did you mean "),
        (["*"], "frozen (*): no weight is left to train; leave a pattern out"),
        (["model.*", "lm_*"], "frozen (model.*, lm_*): no weight is left to train"),
        (
            ["*.2.*.q_proj.*"],
            "frozen (model.layers.2.self_attn.q_proj.weight): is one matrix with "
            "model.layers.2.self_attn.k_proj.weight and model.layers.2.self_attn.v_proj.weight; "
            "freeze all or none",
        ),
        (["*gate_proj*"], "frozen (model.layers.0.mlp.gate_proj.weight): is one matrix with "),
    ],
)
def test_other_patterns_are_refused(patterns, message):
    with pytest.raises(ValueError, match=r"^frozen \(") as error:
        frozen(*patterns)
    assert message in str(error.value)
