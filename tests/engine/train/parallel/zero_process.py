"""One rank of test_zero.py: updates over all ranks' slices beside the same updates in one process.

The two are compared bit for bit. Each rank prints one JSON line.
"""

import json
import os
import sys

import torch
import zerokl.engine.train.parallel.gradient as gradient_module
import zerokl.engine.train.parallel.zero as slices_module
from torch.distributed.device_mesh import init_device_mesh
from zerokl.engine.config.run_config import OptimizerConfig
from zerokl.engine.train.master_weights import SlicedWeights
from zerokl.engine.train.optimizer import GradientOverflowError, Optimizer
from zerokl.engine.train.parallel.data_parallel import ReplicatedWorkers
from zerokl.engine.train.parallel.gradient import GradientTree, add_roots
from zerokl.engine.train.parallel.process_group import Ranks, join_ranks
from zerokl.engine.train.parallel.tree_hash import hash_tree
from zerokl.engine.train.parallel.zero import Slices
from zerokl.files.bitwise import count_unequal
from zerokl.model.config import ModelConfig
from zerokl.model.decoder import Decoder
from zerokl.model.weights import Layout

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
# tied: the embedding is most of the model, and every rank owns a part of it.
# small: the embedding is one block, and two of the ranks own nothing.
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


def random_vector(seed: int, numel: int) -> torch.Tensor:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return torch.where(x.abs() < 0.2, -0.0, x)  # so that there are signed zeros too


def make_optimizer(dtype: torch.dtype, weights: torch.Tensor, layout: Layout, slices: Slices) -> Optimizer:
    decoder = Decoder(layout.config, weights.to(dtype, copy=True), layout)
    tied, large = layout.config.tied, layout.config.vocab_size > 2000
    settings = {"name": "muon"} if not tied else {"moments": "bfloat16" if large else "int8"}
    cfg = OptimizerConfig(lr=1e-2, weight_decay=0.1, warmup_steps=0, **settings)
    return Optimizer(SlicedWeights(decoder, weights, slices), cfg, 100)


def count_differences(ours: Optimizer, alone: Optimizer) -> int:
    """Elements of master weights, compute weights and moments that differ."""
    a, b = ours.weights, alone.weights
    pairs = [(ours.slices.everywhere(a.master), b.master), (a.decoder.flat, b.decoder.flat)]
    pairs += [(ours.slices.everywhere(m), n) for m, n in zip(ours.moments, alone.moments, strict=True)]
    return sum(count_unequal(a, b) for a, b in pairs)


def make_roots(step: int, size: int, numel: int) -> list[torch.Tensor | None]:
    """The root of each rank.

    In step k, a rank whose bit is set in k has no root. In the step where this is every rank, all have one.
    """
    every_rank = 2**size - 1
    return [
        None if step >> rank & 1 and step != every_rank else random_vector(1000 * step + rank, numel)
        for rank in range(size)
    ]


def copied(root: torch.Tensor | None) -> torch.Tensor | None:
    return None if root is None else root.clone()


def count_in_wrong_order(
    slices: Slices, root: torch.Tensor | None, has_root: list[bool], right: torch.Tensor
) -> int:
    """The control: how many elements differ when the ranks' roots are added in another order.

    right: this rank's part of the gradient, from roots added in the right order.
    """
    right, add_in_order = right.clone(), gradient_module.add_roots
    gradient_module.add_roots = lambda parts: add_in_order([*parts[1:], parts[0]])
    try:
        return count_unequal(slices.sum_roots(copied(root), has_root), right)
    finally:
        gradient_module.add_roots = add_in_order


def overflowing_weight(optimizer: Optimizer) -> str:
    """The weight that the optimizer names when one element of the gradient is infinite."""
    layout, slices = optimizer.layout, optimizer.slices
    gradient = random_vector(7, layout.numel)
    layout.checkpoint_views(gradient)["model.layers.0.mlp.up_proj.weight"][3, 5] = float("inf")
    try:
        optimizer.update(gradient[Slices.of_gradient(slices.own)])
        return "nothing"
    except GradientOverflowError as error:
        return error.weight


def along_dimensions(world_rank: int, layout: Layout) -> dict[str, object]:
    """What a rank of a mesh of 2 x 2 ranks gets along each dimension: of its own two ranks, and no others.

    world_rank: among all four.
    """
    mesh, got = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), {}
    for name in mesh.mesh_dim_names:
        ranks = Ranks(mesh[name])
        slices = Slices(layout, ranks)
        roots = [random_vector(rank, layout.numel) for rank in ranks.gather(lambda: world_rank)]
        part = Slices.of_gradient(slices.own)
        gradient = slices.sum_roots(roots[ranks.rank].clone(), [True, True])
        shared = torch.full((layout.numel,), float(world_rank))
        slices.share(shared)
        got[name] = {
            "ranks": ranks.gather(lambda: world_rank),
            "first": ranks.from_first(lambda: world_rank),
            "wrong": count_unequal(gradient, add_roots(roots)[part]) if gradient.numel() else 0,
            "slices": [[part.start, part.stop] for part in slices.parts],
            "shared": shared.unique().tolist(),
            "rounds": rounds(ranks, layout),
        }
    return got


class GivenGradients:
    """In place of Workers: shard i has the gradient random_vector(i), and None is a shard without one."""

    def __init__(self, shards: int, numel: int):
        self.n, self.shards, self._numel, self._tree = 1, shards, numel, GradientTree(shards)

    def sum_shards(
        self, work: None, shards: list[int | None]
    ) -> tuple[list[int | None], torch.Tensor | None]:
        for i in shards:
            self._tree.push(None if i is None else random_vector(i, self._numel))
        return list(shards), self._tree.take()


def rounds(ranks: Ranks, layout: Layout) -> dict[int, list[int]]:
    """16 shards over the ranks, so many neighbours of a rank at a time: exchanges, and unequal elements.

    The last number is the control: elements that are unequal where a rank's shards are no neighbours.
    """
    # Two ranks have no gradient in the first round of single shards.
    shards = [None if i in (0, 1, 7) else i for i in range(16)]
    tree = GivenGradients(16, layout.numel)
    part = Slices.of_gradient(Slices(layout, ranks).own)
    whole = tree.sum_shards(None, shards)[1][part].clone()
    apart = [i for first in range(ranks.size) for i in shards[first :: ranks.size]]
    report = {}
    for at_once in (1, 2, 4, 8):
        if at_once * ranks.size > 16:
            continue
        slices, exchanges = Slices(layout, ranks), 0
        sum_roots = slices.sum_roots

        def counted(root: torch.Tensor | None, has_root: list[bool], call=sum_roots) -> torch.Tensor | None:
            nonlocal exchanges
            exchanges += 1
            return call(root, has_root)

        slices.sum_roots = counted
        workers = ReplicatedWorkers(GivenGradients(at_once, layout.numel), slices, 16)
        results, gradient = workers.sum_shards(None, shards)
        assert results == shards
        counts, unequal = exchanges, count_unequal(gradient, whole)
        report[at_once] = [counts, unequal, count_unequal(workers.sum_shards(None, apart)[1], whole)]
    return report


def main(dtype: torch.dtype, shape: str) -> dict[str, object]:
    slices_module._PIECE = 8192  # so that a slice has several pieces
    config = ModelConfig.from_dict(CONFIG.raw | SHAPES[shape])
    with join_ranks() as ranks:
        layout = Layout(config)
        weights = random_vector(0, layout.numel)
        ours = make_optimizer(dtype, weights, layout, Slices(layout, ranks))
        alone = make_optimizer(dtype, weights, layout, Slices(layout))
        slices = ours.slices
        unequal, unequal_wrong_order, unequal_norms = 0, 0, 0
        for step in range(9):
            roots = make_roots(step, ranks.size, layout.numel)
            has_root, root = [r is not None for r in roots], roots[ranks.rank]
            gradient = slices.sum_roots(copied(root), has_root).clone()
            whole = add_roots([copied(r) for r in roots])
            unequal_norms += ours.update(gradient, 4.0)["grad_norm"] != alone.update(whole, 4.0)["grad_norm"]
            unequal += count_differences(ours, alone)
            unequal_wrong_order += count_in_wrong_order(slices, root, has_root, gradient)
            tree = slices.hash_tree(slices.hashing(gradient))
            assert tree == hash_tree(layout.blocks, whole)
        overflow = overflowing_weight(ours)
        part, state = slices.own, (ours.weights.master, *ours.moments)
        sizes = [part.start, part.stop, *(x.numel() for x in state), slices._sum.numel()]
        collected = slices.collect(ours.weights.master)
        return {
            "differences": unequal + count_differences(ours, alone),
            "collected": count_unequal(collected, alone.weights.master) if ranks.first else collected,
            "norms": unequal_norms,
            "wrong_order": unequal_wrong_order,
            "overflow": overflow,
            "numel": layout.numel,
            "slices": ranks.gather(lambda: sizes),
            "rounds": rounds(ranks, layout),
            "dimensions": [ranks.rank, along_dimensions(ranks.rank, layout)],
        }


if __name__ == "__main__":
    line = json.dumps(main(getattr(torch, sys.argv[1]), sys.argv[2]))
    os.write(1, f"{line}\n".encode())  # in one write, because the ranks share the pipe
