"""Tiny checkpoints of all families, written by transformers, and the results of transformers."""

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.masking_utils import eager_mask
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteTopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextTopKRouter
from zerokl.model.config import ModelConfig
from zerokl.model.families import MODEL_TYPES

_SIZE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_SOFTMAX_ROUTERS = (
    Qwen3MoeTopKRouter | MixtralTopKRouter | Qwen2MoeTopKRouter | Qwen3NextTopKRouter | Qwen3_5MoeTopKRouter
)
_THETA = {"rope_type": "default", "rope_theta": 1e6}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**_SIZE, head_dim=32, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**_SIZE, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(
        **_SIZE,
        head_dim=32,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        mlp_only_layers=[0],
    ),
    "llama": LlamaConfig(**_SIZE, tie_word_embeddings=False, rope_parameters=_LLAMA3),
    # As in Nemo, the heads together are not as wide as the hidden states.
    "qwen2_moe": Qwen2MoeConfig(
        **_SIZE,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=80,
        mlp_only_layers=[0],
    ),
    "glm4_moe": Glm4MoeConfig(
        **_SIZE,
        head_dim=32,
        use_qk_norm=True,
        attention_bias=True,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        first_k_dense_replace=1,
    ),
    # Heads together narrower than the hidden states, and one layer's experts in a checkpoint's own names.
    "mixtral": MixtralConfig(
        **_SIZE, num_local_experts=6, num_experts_per_tok=3, rope_parameters=_THETA, head_dim=16
    ),
    "mistral": MistralConfig(**_SIZE, head_dim=32, sliding_window=None, tie_word_embeddings=False),
    # One layer with a window and one without, which two layers of the usual pattern do not have.
    "olmo3": Olmo3Config(
        **_SIZE,
        layer_types=["sliding_attention", "full_attention"],
        **{x: MODEL_TYPES["olmo3"].small[x] for x in ("sliding_window", "rope_parameters")},
        pad_token_id=None,
    ),
    "qwen3_5_text": Qwen3_5TextConfig(
        **_SIZE,
        head_dim=32,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=32,
        tie_word_embeddings=False,
    ),
    "gpt_oss": GptOssConfig(
        **_SIZE
        | MODEL_TYPES["gpt_oss"].small
        | {"head_dim": 16, "num_local_experts": 6, "intermediate_size": 64}
    ),
    "qwen2 yarn": Qwen2Config(**_SIZE, tie_word_embeddings=False, rope_parameters=_YARN),
    "llama linear": LlamaConfig(**_SIZE, rope_parameters={"rope_type": "linear", "factor": 4.0}),
    "qwen3 bias": Qwen3Config(**_SIZE, head_dim=32, attention_bias=True, tie_word_embeddings=True),
    # Moonlight's queries have no latent. Halves are rotated, biases stand where they may, values are as wide
    # as keys, and no layer has experts: without their choices it is judged in bf16, too.
    "deepseek_v3 yarn": DeepseekV3Config(
        **_SIZE
        | MODEL_TYPES["deepseek_v3"].small
        | {"q_lora_rank": None, "rope_interleave": False, "attention_bias": True, "v_head_dim": 32}
        | {"first_k_dense_replace": 2, "pad_token_id": None},
        rope_parameters=_YARN | {"mscale": 0.7, "mscale_all_dim": 0.9},
    ),
}
# Of the other families, the small model of `zerokl init`. To transformers, padding has no gradient.
FAMILIES |= {
    name: AutoConfig.for_model(name, **_SIZE | family.small | {"pad_token_id": None})
    for name, family in MODEL_TYPES.items()
    if name not in FAMILIES
}
# As parameters of long tests: with --quick, without those whose blocks are also in others.
_LIKE_OTHERS = "llama", "llama linear", "mistral", "mixtral", "qwen2_moe", "qwen2 yarn", "qwen3 bias"
_LIKE_OTHERS += "granite", "smollm3", "phi3", "qwen3_next", "qwen3_5_moe_text", "gemma", "olmo3"
JUDGED_FAMILIES = [
    pytest.param(name, marks=pytest.mark.full) if name in _LIKE_OTHERS else name for name in FAMILIES
]
Pairs = list[tuple[list[int], list[int]]]


def save_random(family: str, folder: Path, seed: int = 0, shard: str = "1GB") -> Path:
    """Write a checkpoint in which all weights are random.

    Norms and biases are random too; transformers starts them at 1 and 0.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[family])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
        for buffer in buffers_of(model).values():
            buffer.add_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def plain(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    return _loaded(folder, dtype, "eager")


def _loaded(folder: Path, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    # The fused products of experts know no fp64.
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention, experts_implementation="eager"
    )


def judge(folder: Path) -> PreTrainedModel:
    """transformers in fp64 throughout.

    Its norms, RoPE frequencies, eager softmax and router are fp32 in any dtype. Here they are fp64.
    """
    AttentionInterface.register("fp64", _capped_attention)
    AttentionMaskInterface.register("fp64", eager_mask)
    config = AutoConfig.from_pretrained(folder)
    attention = {"gemma2": "fp64", "gpt_oss": "eager"}  # gpt-oss has its own, with a softmax in any dtype
    model = _loaded(folder, torch.float64, attention.get(config.model_type, "sdpa"))
    config, embedding = ModelConfig.from_file(folder), model.model.rotary_emb

    def rotary(
        x: torch.Tensor, position_ids: torch.Tensor, layer_type: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if position_ids.dim() == 3:  # of text, image rows and columns: equal in a text
            position_ids = position_ids[0]
        rotating = config.rotating(model.config.layer_types.index(layer_type)) if layer_type else config
        frequencies = torch.tensor(rotating.frequencies, dtype=torch.float64)
        scale = getattr(embedding, f"{layer_type}_attention_scaling" if layer_type else "attention_scaling")
        repeats = 1 if model.config.model_type in ("gpt_oss", "deepseek_v2") else 2
        angle = position_ids[..., None] * frequencies.repeat(repeats)
        if model.config.model_type == "deepseek_v2":
            return torch.polar(torch.full_like(angle, scale), angle)
        return angle.cos() * scale, angle.sin() * scale

    for module in model.modules():
        if isinstance(module, GemmaRMSNorm | Gemma2RMSNorm | Gemma3RMSNorm):
            module.forward = lambda x, m=module: (
                x / (x.pow(2).mean(-1, keepdim=True) + m.eps).sqrt() * (1.0 + m.weight)
            )
        if type(module).__name__.endswith(_WITH_CASTS):
            module.forward = _without_casts(module)
            continue
        if hasattr(module, "variance_epsilon"):
            module.forward = lambda x, m=module: (
                x / (x.pow(2).mean(-1, keepdim=True) + m.variance_epsilon).sqrt() * m.weight
            )
        if isinstance(module, Glm4MoeTopkRouter | Glm4MoeLiteTopkRouter | DeepseekV3TopkRouter):
            module.double()  # transformers keeps it in fp32
            module.forward = lambda x, m=module: _route_by_scores(x.view(-1, m.hidden_dim), m)
        if isinstance(module, DeepseekV2TopkRouter):
            module.double()
            module.forward = lambda x, m=module: _route_in_groups(x.view(-1, m.hidden_dim), m)
        if isinstance(module, _SOFTMAX_ROUTERS):
            module.forward = lambda x, m=module: _route(x.view(-1, m.hidden_dim), m)
    embedding.forward = rotary
    return model


def _capped_attention(module, q, k, v, mask, scaling, softcap=None, **_):
    """The eager attention of transformers, whose softmax is of the dtype of q. q [1, Hq, T, D]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scaling
    scores = scores if softcap is None else (scores / softcap).tanh() * softcap
    return ((scores + mask).softmax(-1) @ v).transpose(1, 2), None


# Modules that compute in fp32 whatever the dtype: of hybrids, and what rotates in DeepSeek-V2.
_WITH_CASTS = "V2Attention", "GatedDeltaNet", "5RMSNorm", "NextRMSNorm", "RMSNormGated", "MoeRMSNorm"


class _Torch:
    """torch, in which float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


def _without_casts(module: torch.nn.Module) -> Callable:
    """The forward of a module of transformers, with fp64 wherever its file says fp32."""
    forward, file = module.forward, sys.modules[type(module).__module__]

    @wraps(forward)
    def in_fp64(*args: object, **kwargs: object) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(file, "torch", _Torch())
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            return forward(*args, **kwargs)

    return in_fp64


def _route(x: torch.Tensor, router: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """The logits, the weights and the ids of the experts, as the router gives them, in the dtype of x.

    Mixtral's router has no norm_topk_prob, and always divides.
    """
    logits = x @ router.weight.t()
    weights, ids = logits.softmax(-1).topk(router.top_k, -1)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, ids


def _route_by_scores(x: torch.Tensor, router: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """As _route, of a sigmoid router with groups, whose own products are in fp32."""
    logits = x @ router.weight.t()
    scores = logits.sigmoid()
    groups = (scores + router.e_score_correction_bias).unflatten(1, (router.num_group, -1))
    best = groups.topk(2, -1)[0].sum(-1).topk(router.topk_group, -1)[1]
    kept = torch.zeros_like(groups[..., 0]).scatter(1, best, 1.0).bool().unsqueeze(2)
    ids = groups.masked_fill(~kept, -torch.inf).flatten(1).topk(router.top_k, -1)[1]
    weights = scores.gather(1, ids)
    return logits, weights / weights.sum(-1, keepdim=True) * router.routed_scaling_factor, ids


def _route_in_groups(x: torch.Tensor, router: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """As _route, of DeepSeek-V2's router, whose own products are in fp32."""
    logits = x @ router.weight.t()
    scores = logits.softmax(-1)
    if router.topk_method == "group_limited_greedy":
        groups = scores.unflatten(1, (router.num_group, -1))
        others = groups.amax(2).sort(1, descending=True)[1][:, router.topk_group :]
        scores = groups.scatter(1, others.unsqueeze(2).expand(-1, -1, groups.shape[2]), 0.0).flatten(1)
    weights, ids = scores.topk(router.top_k, -1)
    return logits, weights * router.routed_scaling_factor, ids


def sequence_losses(logp: torch.Tensor, pairs: Pairs, dy: torch.Tensor) -> torch.Tensor:
    """dy . logp of each sequence, [S]."""
    return torch.stack([x.sum() for x in (logp * dy.to(logp.dtype)).split([len(c) for _, c in pairs])])


def logprobs_and_gradients(model: PreTrainedModel, pairs: Pairs, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """transformers' results by name, with one forward for each sequence.

    logp of the completions, the losses, and the gradients of the sum of the losses. A gradient has the name
    of its weight in the checkpoint.
    """
    logps = []
    for prompt, completion in pairs:
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        ids = torch.tensor(completion).unsqueeze(1)
        logps.append(torch.log_softmax(logits, -1).gather(1, ids).squeeze(1))
    logp = torch.cat(logps)
    losses = sequence_losses(logp, pairs, dy)
    losses.sum().backward()
    return {
        "logp": logp.detach(),
        "losses": losses.detach(),
        **{
            name: grad
            for weight, p in model.named_parameters()
            for name, grad in checkpoint_parts(weight, p.grad, model)
        },
    }


def buffers_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The buffers of a model that its checkpoint holds, by name."""
    return {name: x for name, x in model.named_buffers() if name in model.state_dict()}


def checkpoint_parts(
    name: str, x: torch.Tensor, model: PreTrainedModel
) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of transformers by the names of the checkpoint, in which each expert has its own."""
    gate, up, down = "gate_proj", "up_proj", "down_proj"
    if model.config.model_type == "mixtral":
        name, gate, up, down = name.replace(".mlp.", ".block_sparse_moe."), "w1", "w3", "w2"
    experts, _, kind = name.rpartition(".")
    if not experts.endswith(".experts") or model.config.model_type == "gpt_oss":
        yield name, x
        return
    for e, expert in enumerate(x):
        both = zip((gate, up), expert.chunk(2), strict=True)
        for part, matrix in both if kind == "gate_up_proj" else [(down, expert)]:
            yield f"{experts}.{e}.{part}.weight", matrix
