"""Tiny models of random weights of families that zerokl has no decoder of, with a tokenizer of bytes."""

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB = 260
_SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
    initializer_range=0.2,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
)
_GROUPED = _SIZES | dict(num_key_value_heads=2, head_dim=8)
_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
# The name of transformers' configuration -> its fields.
FAMILIES = {
    "GPT2": dict(n_embd=32, n_layer=2, n_head=4, n_positions=128) | _SIZES,
    "GPTNeoX": _SIZES,
    "Gemma2": _GROUPED | dict(sliding_window=8, query_pre_attn_scalar=8),
    "Olmo2": _SIZES,
    "GptOss": _GROUPED | _EXPERTS | dict(layer_types=["sliding_attention", "full_attention"]),
    "Mamba": dict(_SIZES, state_size=4),
}


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: three special tokens, and the bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<bos>", "<eos>", "<pad>", *alphabet])}
    bytes_alone = Tokenizer(models.BPE(vocab, []))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    special = dict(bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<pad>")
    PreTrainedTokenizerFast(tokenizer_object=bytes_alone, **special).save_pretrained(folder)


def write_family(name: str, folder: Path) -> Path:
    """A random model of a family in `folder`, with its tokenizer."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**FAMILIES[name])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    write_tokenizer(folder)
    return folder
