"""Small models on which no hypothesis was written: a Llama, a Qwen3 and a Qwen2, trained by transformers.

They learn turns cut from the text of Python's own help, with a byte-level BPE of 512 tokens, until a token
has an entropy of about 2.6 nats at temperature 0.8. A world (audit/faults/planting/) is one of them with
prompts.
"""

import random
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    set_seed,
)
from zerokl.audit.faults.planting.world import Texts, World

BOS, END, PAD, USER, ASSISTANT = "<|bos|>", "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCAB, STEPS, BATCH, LENGTH = 512, 260, 12, 128
_SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=96,
    intermediate_size=192,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=16,
    max_position_embeddings=512,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
)
_SCALED = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
    rope_theta=50000.0,
)


def text() -> str:
    """The corpus: what Python's help() says of its topics. No page of docs/ may change these models."""
    return "\n".join(topics[name] for name in sorted(topics))


def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE of the corpus, with a chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [BOS, END, PAD, USER, ASSISTANT]
    bpe.train_from_iterator(
        [text()], trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet)
    )
    # Bytes know every text. But transformers adds a token of its own to a Qwen2 that names none.
    named = dict(bos_token=BOS, eos_token=END, pad_token=PAD, unk_token=PAD)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, **named)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return fast


def turn(fast, words: list[str], rng: random.Random) -> tuple[list[int], list[int]]:
    """The ids of a prompt in the chat template, and of an answer that the corpus continues it with."""
    start = rng.randrange(len(words) - 80)
    asked = rng.randrange(2, 9)
    prompt = f"{BOS}{USER}{' '.join(words[start : start + asked])}\n{ASSISTANT}"
    answer = f"{' '.join(words[start + asked : start + asked + rng.randrange(12, 40)])}{END}"
    return (fast.encode(x, add_special_tokens=False) for x in (prompt, answer))


def config(family: str):
    """The configuration of a family."""
    if family == "llama":
        rope = dict(rope_parameters=_SCALED)
        return LlamaConfig(**_SIZES, rms_norm_eps=1e-5, tie_word_embeddings=False, **rope)
    if family == "qwen2":  # with biases
        rope = dict(rope_parameters=dict(rope_type="default", rope_theta=80000.0))
        sizes = {name: x for name, x in _SIZES.items() if name != "head_dim"}
        return Qwen2Config(**sizes, rms_norm_eps=1e-6, tie_word_embeddings=True, **rope)
    if family == "gpt_neox":  # zerokl has no decoder of it
        rope = dict(rope_parameters=dict(rope_type="default", rope_theta=20000.0, partial_rotary_factor=0.25))
        sizes = {name: x for name, x in _SIZES.items() if name not in ("head_dim", "num_key_value_heads")}
        return GPTNeoXConfig(**sizes, layer_norm_eps=1e-5, tie_word_embeddings=False, **rope)
    rope = dict(rope_parameters=dict(rope_type="default", rope_theta=30000.0))
    return Qwen3Config(**_SIZES, rms_norm_eps=1e-6, tie_word_embeddings=True, **rope)


def make(family: str, folder: Path, seed: int = 0, steps: int = STEPS) -> Path:
    """Train a model and write it with its tokenizer; a folder that exists is taken as it is.

    Beside it, folder-old is the same model some steps earlier: weights that a late sync would draw with.
    """
    if (folder / "config.json").exists():
        return folder
    fast = tokenizer(folder)
    fast.save_pretrained(old := folder.with_name(f"{folder.name}-old"))
    set_seed(seed)
    model = AutoModelForCausalLM.from_config(config(family))
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.01)
    rng, words = random.Random(seed), text().split(" ")
    for step in range(steps):
        rows = [[*chain(*turn(fast, words, rng))][:LENGTH] for _ in range(BATCH)]
        longest = max(map(len, rows))
        ids = torch.tensor([x + [2] * (longest - len(x)) for x in rows])
        labels = ids.masked_fill(ids == 2, -100)
        optimizer.param_groups[0]["lr"] = 6e-3 * min(1.0, (step + 1) / 20) * (1.1 - step / steps)
        loss = model(ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == steps - 8:
            model.save_pretrained(old)
    model.save_pretrained(folder)
    return folder


def world(
    family: str, seed: int, root: Path, steps: int = STEPS, dtype: torch.dtype = torch.bfloat16
) -> World:
    """A family's world, with six prompts of two lengths."""
    folder = make(family, root / family, steps=steps)
    words = text().split(" ")
    prompts = _prompts(AutoTokenizer.from_pretrained(folder), words, random.Random(100 + seed))
    texts = Texts(words, USER, ASSISTANT)
    return World(family, seed, folder, root / f"{family}-old", prompts, texts, dtype)


def _prompts(fast, words: list[str], rng: random.Random) -> list[list[int]]:
    by_length: dict[int, list[list[int]]] = {}
    while sum(len(x) >= 3 for x in by_length.values()) < 2:
        prompt = next(iter(turn(fast, words, rng)))
        by_length.setdefault(len(prompt), []).append(prompt)
    groups = [x[:3] for x in by_length.values() if len(x) >= 3]
    return [prompt for group in zip(*groups, strict=True) for prompt in group]
