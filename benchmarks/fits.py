"""What a card can train, and what it keeps beside itself for that, as zerokl predicts it before a run.

    python benchmarks/fits.py            a table for docs/costs.md; nothing is measured, and no GPU is needed

The bytes are those of engine/runs/memory.py and offloading.py, with recompute = "layer", one sequence a pass,
8 prompts x 8 samples, 8 virtual shards, prompts of 512 tokens, and a cache for `AT_ONCE` samples.
"""

from dataclasses import replace

import torch
from zerokl.benchmarks.machine import SHAPES, shape_config
from zerokl.engine.config.run_config import Config
from zerokl.engine.runs.memory import RunShape, fit_into
from zerokl.engine.runs.offloading import beside, placed_into
from zerokl.model.adapters import AdapterLayout, adapted_layout
from zerokl.model.cache import BlockCache
from zerokl.model.weights import Layout
from zerokl.pages.markdown import table

GIB = 1 << 30
CARDS = {"24 GB": 23.5, "80 GB": 79.1, "141 GB": 139.8}  # GiB that are free
AT_ONCE = {"24 GB": 2, "80 GB": 8, "141 GB": 8}
HOST = 128  # GiB that are free beside each card
PROMPT, LENGTHS = 512, (8192, 16384, 32768)
VOCABULARY = 151936
QWEN3 = SHAPES | {"4B": (2560, 9728, 36, 32, 8, 128), "14B": (5120, 17408, 40, 40, 8, 128)}
MODELS = ["0.6B", "1.7B", "4B", "8B", "14B"]


def run_of(name: str, tokens: int, lora: bool, at_once: int) -> RunShape:
    """A run of this model with completions of `tokens` tokens."""
    model = shape_config(QWEN3[name], VOCABULARY, tied=name not in ("8B", "14B"))
    blocks = BlockCache.blocks_for(PROMPT) + at_once * (BlockCache.blocks_for(tokens) + 1) + 1
    cache_bytes = blocks * BlockCache.bytes_per_block(model, torch.bfloat16)
    config = Config(
        dtype="bfloat16",
        recompute="layer",
        prompts=8,
        micro_batch=1,
        shards_in_flight=1,
        sampling={"max_tokens": tokens},
        native={"cache_bytes": cache_bytes},
        evaluation={"every": 0},
        lora={"rank": 16} if lora else {},
    )
    run = RunShape(config, Layout(model), 1, PROMPT)
    if not lora:
        return run
    layout = adapted_layout(model, config.lora.shape)
    adapters = AdapterLayout(layout, config.lora.shape)
    return replace(run, layout=layout, adapters=adapters, base=torch.bfloat16)


def place(run: RunShape, gib: float) -> str:
    """Where a run on this card keeps what no kernel reads, with GiB beside the card; "-" where none fits."""
    free = int(gib * GIB)
    chosen = placed_into(run, free, HOST * GIB)
    try:
        sizes = fit_into(chosen, free)
    except ValueError:
        return "-"
    name = chosen.config.memory.offload
    return "card" if name == "none" else f"{name} {sum(beside(chosen, sizes)) / GIB:.0f}"


def row(name: str, lora: bool) -> list[str]:
    """The cells of a line of the table."""
    cells = [
        ", ".join(place(run_of(name, tokens, lora, AT_ONCE[card]), gib) for tokens in LENGTHS)
        for card, gib in CARDS.items()
    ]
    return [name, "LoRA 16" if lora else "all", *cells]


def main() -> None:
    heads = ["model", "trained", *(f"{card} at 8k, 16k, 32k" for card in CARDS)]
    print(table(heads, (row(name, lora) for name in MODELS for lora in (False, True))))


if __name__ == "__main__":
    main()
