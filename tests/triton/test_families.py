"""The law for tiny models with windows, caps, sinks and norms by 1 + w, on Triton, interpreted."""

import pytest
import torch
from zerokl.benchmarks.exactness import law
from zerokl.engine.runs.init import preset_config
from zerokl.kernels.attention_rule import AttentionRule
from zerokl.model.config import ModelConfig
from zerokl.model.decoder import Decoder, Numerics
from zerokl.model.operation import Equation
from zerokl.model.weights import Layout

from tests.helpers import randn
from tests.random_model import ONE_LAYER

WIDTHS = ONE_LAYER | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}


def decoder(model_type: str, dtype: torch.dtype, rule: AttentionRule) -> Decoder:
    config = preset_config(model_type, 120, WIDTHS)
    layout = Layout(config)
    flat = randn(0, layout.numel, scale=0.15)
    return Decoder(config, flat.to(dtype), layout, Numerics(attention=rule))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_law_of_a_hybrid(dtype):
    """test_delta_net.py has longer sequences, which end a chunk."""
    net = {f"linear_{what}": n for what, n in (("key_head_dim", 16), ("value_head_dim", 16))}
    config = preset_config("qwen3_5_text", 120, ONE_LAYER | net | {"num_hidden_layers": 2})
    layout = Layout(config)
    model = Decoder(config, randn(0, layout.numel, scale=0.15).to(dtype), layout)
    rows = list(law(model, "hybrid", (5, 21)))
    assert {row["what"]: row["unequal"] for row in rows if row["unequal"]} == {}
    assert len(rows) == 6


def attentions(config: ModelConfig) -> list[tuple[int, float]]:
    """The window and the cap of each layer."""
    rows = (row for layer in config.layer_operations for row in layer)
    return [(row.window, row.cap) for row in rows if row.equation is Equation.ATTENTION]


@pytest.mark.full
@pytest.mark.parametrize(
    ("model_type", "dtype", "rule"),
    [
        ("gemma2", torch.bfloat16, AttentionRule()),
        ("gemma2", torch.float32, AttentionRule()),
        ("gemma2", torch.float16, AttentionRule(64)),
        ("gemma3_text", torch.bfloat16, AttentionRule()),
        ("olmo3", torch.float16, AttentionRule()),
        ("gpt_oss", torch.bfloat16, AttentionRule()),
        ("gpt_oss", torch.float32, AttentionRule(64)),
        ("gpt_oss", torch.float16, AttentionRule()),
    ],
)
def test_the_law(model_type, dtype, rule):
    model = decoder(model_type, dtype, rule)
    windows, caps = zip(*attentions(model.config), strict=True)
    assert (windows, any(caps)) == ((8, 0), model_type == "gemma2")
    rows = list(law(model, model_type, (5, 13)))
    assert {row["what"]: row["unequal"] for row in rows if row["unequal"]} == {}
    assert len(rows) == 6
