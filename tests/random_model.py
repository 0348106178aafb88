"""A checkpoint of random weights, as `zerokl init` would write it before any training."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from zerokl.engine.runs import init as initialise
from zerokl.engine.tasks.tokenizer import character_tokenizer
from zerokl.model.buffers import BYTES, as_bytes
from zerokl.model.checkpoint_writing import write_checkpoint

from tests.helpers import randn

ONE_LAYER = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)

TWO_LAYERS = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)

# A dense layer, and one with experts.
EXPERTS = TWO_LAYERS | dict(
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=48,
    norm_topk_prob=True,
    mlp_only_layers=[0],
)

# Small models of the other families that have experts, by the name of their preset.
MIXTURES = {
    "mixtral": initialise.PRESETS["mixtral"] | TWO_LAYERS | dict(intermediate_size=48),
    "gpt_oss": initialise.PRESETS["gpt_oss"] | TWO_LAYERS | dict(intermediate_size=48),
    "glm4_moe": initialise.PRESETS["glm4_moe"] | TWO_LAYERS | dict(moe_intermediate_size=48, head_dim=32),
    "qwen2_moe": initialise.PRESETS["qwen2_moe"]
    | TWO_LAYERS
    | dict(moe_intermediate_size=48, shared_expert_intermediate_size=32, mlp_only_layers=[0]),
}


def random_model(
    root: Path, widths: dict[str, Any], sharper: float = 1.0, characters: Sequence[str] = ""
) -> Path:
    """Write a Qwen3, or a Qwen3-MoE, with the character tokenizer; return its folder, which is below `root`.

    widths: of config.json. All weights are multiplied by `sharper`. characters: texts of the tokens; empty is
    the tokenizer's own.
    """
    tokenizer = character_tokenizer(characters) if characters else character_tokenizer()
    tokenizer.save_pretrained(root / "tokenizer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(initialise.PRESETS, "test", widths)
        decoder = initialise.random_decoder("test", len(tokenizer), 0)
    decoder.flat.mul_(sharper)
    for i, name in enumerate(sorted(decoder.layout.buffers)):
        held = decoder.layout.checkpoint_views(decoder.flat.detach())[name]
        held.copy_(as_bytes(randn(i, len(held) // BYTES, scale=0.03)))
    write_checkpoint(root / "model", decoder.layout, decoder.flat.detach(), companions=root / "tokenizer")
    return root / "model"


def of_long_prompts(model: Path, out: Path) -> dict[str, Any]:
    """Settings of a run over prompts of 500 to 1,100 tokens. Files, and a model with room, go to `out`.

    Each context has several chunks of 512 keys, or gets its second one while tokens are drawn.
    """
    shutil.copytree(model, out / "long")
    config = json.loads((out / "long" / "config.json").read_text())
    (out / "long" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    prompts = [f"{i}+" * (n // 2) + "=" for i, n in enumerate((500, 505, 508, 640, 1020, 1100))]
    lines = [json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts]
    (out / "long.jsonl").write_text("".join(lines))
    return {
        "model": str(out / "long"),
        "task.name": "jsonl",
        "task.options": {"file": str(out / "long.jsonl"), "chat": False},
        "task.reward_processes": "1",
    }
