"""Tiny checkpoints of the three families, written by transformers, and the results of transformers."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from zerokl.model.config import ModelConfig

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
FAMILIES: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**_SIZE, head_dim=32, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**_SIZE, tie_word_embeddings=False),
    "llama": LlamaConfig(**_SIZE, tie_word_embeddings=False, rope_parameters=_LLAMA3),
}
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
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def plain(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")


def judge(folder: Path) -> PreTrainedModel:
    """transformers in fp64 throughout.

    Its norms, RoPE frequencies and eager softmax are fp32 in any dtype. Here they are fp64.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    frequencies = torch.tensor(ModelConfig.from_file(folder).frequencies, dtype=torch.float64)

    def rotary(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = position_ids[..., None] * frequencies.repeat(2)
        return angle.cos(), angle.sin()

    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = lambda x, m=module: (
                x / (x.pow(2).mean(-1, keepdim=True) + m.variance_epsilon).sqrt() * m.weight
            )
    model.model.rotary_emb.forward = rotary
    return model


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
        **{name: p.grad for name, p in model.named_parameters()},
    }
