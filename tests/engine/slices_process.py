"""A rank of test_slices.py:

updates over all ranks' slices beside the same updates alone, bit for bit. Prints one JSON line.
"""

import json
import os
import sys

import torch
import zerokl.engine.parallel.zero as slices_module
from zerokl.engine.config import OptimizerConfig
from zerokl.engine.parallel.gradient import add_roots
from zerokl.engine.parallel.ranks import join_ranks
from zerokl.engine.parallel.zero import Slices
from zerokl.engine.train.optimizer import GradientOverflowError, Optimizer
from zerokl.model.config import ModelConfig
from zerokl.model.decoder import Decoder
from zerokl.model.weights import Layout
from zerokl.verify.bitwise import count_unequal
from zerokl.verify.ledger import hash_tree

CONFIG = ModelConfig.from_dict(
    dict(
        architectures=["Qwen3ForCausalLM"],
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=300,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        hidden_act="silu",
        model_type="qwen3",
    )
)
# Tied: the embedding is most of the model, and all ranks own a part of it. Small: it is one block, and two of
# the ranks own nothing.
SHAPES = {
    "untied": {},
    "tied": {"tie_word_embeddings": True, "vocab_size": 9000},
    "small": {
        "tie_word_embeddings": True,
        "vocab_size": 2000,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "head_dim": 16,
    },
}


def drawn(seed: int, numel: int) -> torch.Tensor:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return torch.where(x.abs() < 0.2, -0.0, x)  # signed zeros too


def optimizer(dtype: torch.dtype, weights: torch.Tensor, layout: Layout, slices: Slices) -> Optimizer:
    decoder = Decoder(layout.config, weights.to(dtype, copy=True), layout)
    return Optimizer(
        decoder, weights, OptimizerConfig(lr=1e-2, weight_decay=0.1, warmup_steps=0), 100, slices
    )


def differences(ours: Optimizer, alone: Optimizer) -> int:
    pairs = [(ours.slices.everywhere(ours.master), alone.master), (ours.decoder.flat, alone.decoder.flat)]
    pairs += [(ours.slices.everywhere(m), n) for m, n in zip(ours.moments, alone.moments, strict=True)]
    return sum(count_unequal(a, b) for a, b in pairs)


def roots_of(step: int, size: int, numel: int) -> list[torch.Tensor | None]:
    """Each rank's root; in step k, the ranks whose bit is set in k have none."""
    return [
        None if step >> r & 1 and step != 2**size - 1 else drawn(1000 * step + r, numel) for r in range(size)
    ]


def in_wrong_order(slices: Slices, mine: torch.Tensor | None, has: list[bool], right: torch.Tensor) -> int:
    """The control:

    elements of this rank's part of the gradient that differ when the ranks' roots are added in another order.
    """
    right, plain = right.clone(), slices_module.add_roots
    slices_module.add_roots = lambda parts: plain([*parts[1:], parts[0]])
    try:
        wrong = slices.sum_roots(None if mine is None else mine.clone(), has)
        return count_unequal(wrong, right)
    finally:
        slices_module.add_roots = plain


def main(dtype: torch.dtype, shape: str) -> dict[str, object]:
    slices_module._PIECE = 8192  # several pieces to a slice
    config = ModelConfig.from_dict(CONFIG.raw | SHAPES[shape])
    with join_ranks() as ranks:
        layout = Layout(config)
        weights = drawn(0, layout.numel)
        ours, alone = (optimizer(dtype, weights, layout, s) for s in (Slices(layout, ranks), Slices(layout)))
        found, wrong, norms = 0, 0, 0
        for step in range(9):
            roots = roots_of(step, ranks.size, layout.numel)
            has, mine = [r is not None for r in roots], roots[ranks.rank]
            gradient = ours.slices.sum_roots(None if mine is None else mine.clone(), has).clone()
            whole = add_roots([None if r is None else r.clone() for r in roots])
            norms += ours.update(gradient, 4.0)["grad_norm"] != alone.update(whole, 4.0)["grad_norm"]
            found += differences(ours, alone)
            wrong += in_wrong_order(ours.slices, mine, has, gradient)
            assert ours.slices.hash_tree(ours.slices.hashing(gradient)) == hash_tree(
                layout.checkpoint_views(whole)
            )
        planted = drawn(7, layout.numel)
        layout.checkpoint_views(planted)["model.layers.0.mlp.up_proj.weight"][3, 5] = float("inf")
        try:
            ours.update(planted[Slices.of_gradient(ours.slices.own)])
            named = "nothing"
        except GradientOverflowError as error:
            named = error.weight
        own, kept = ours.slices.own, (ours.master, *ours.moments)
        collected = ours.slices.collect(ours.master)
        return {
            "differences": found + differences(ours, alone),
            "collected": count_unequal(collected, alone.master) if ranks.first else collected,
            "norms": norms,
            "wrong_order": wrong,
            "named": named,
            "numel": layout.numel,
            "kept": ranks.gather(
                lambda: [own.start, own.stop, *(x.numel() for x in kept), ours.slices._sum.numel()]
            ),
        }


if __name__ == "__main__":
    line = json.dumps(main(getattr(torch, sys.argv[1]), sys.argv[2]))
    os.write(1, f"{line}\n".encode())  # at once: the ranks share the pipe
