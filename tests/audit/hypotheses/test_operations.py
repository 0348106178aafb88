"""An engine whose single operations differ is named from its log alone: nothing of it can be traced."""

import torch
from transformers.models.qwen3 import modeling_qwen3
from zerokl.audit.engines.hf import HfEngine

from tests.audit.hypotheses.planted import SAMPLING, relogged, report_of, write

_plain_rope = modeling_qwen3.apply_rotary_pos_emb


def _narrow_rope(q, k, cos, sin, *more, **options):
    narrow = (x.bfloat16() for x in (q, k, cos, sin))
    return tuple(x.to(q.dtype) for x in _plain_rope(*narrow, *more, **options))


class _NarrowMlp(torch.nn.Module):
    """A gated MLP whose fused activation computes in bf16."""

    def __init__(self, mlp: torch.nn.Module):
        super().__init__()
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        g, u = self.mlp.gate_proj(x).bfloat16(), self.mlp.up_proj(x).bfloat16()
        return self.mlp.down_proj((torch.nn.functional.silu(g) * u).to(x.dtype))


def _found(case, tmp_path, engine: HfEngine) -> dict:
    logged = engine.score([r.pair for r in case.rollouts], SAMPLING, together=False)
    log = write(tmp_path / "log.jsonl", relogged(case.rollouts, logged))
    return report_of(case, log)["hypotheses"]["found"]


def test_a_fused_rotary_embedding_in_bf16_is_named(case, tmp_path, monkeypatch):
    """NeMo-RL#1801: a fused rotary embedding keeps its intermediates in bf16. The engine is transformers."""
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", _narrow_rope)
    named = _found(case, tmp_path, HfEngine(case.folder, torch.float32))
    assert named["name"] == "16-bit intermediates"
    assert named["what"] == "intermediates of the sampler's rotary embedding are in bfloat16"
    assert "apply_rope_fusion" in named["remedy"]


def test_a_fused_activation_in_bf16_is_named(case, tmp_path, monkeypatch):
    """NeMo-RL#1801: the same of the activation, and of both together."""
    engine = HfEngine(case.folder, torch.float32)
    for layer in engine.model.model.layers:
        layer.mlp = _NarrowMlp(layer.mlp)
    assert _found(case, tmp_path, engine)["what"].endswith("sampler's activation are in bfloat16")
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", _narrow_rope)
    assert "sampler's rotary embedding and activation are" in _found(case, tmp_path, engine)["what"]
