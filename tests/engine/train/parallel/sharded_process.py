"""One rank of test_sharded.py: updates of weights that FSDP shards, beside the same updates in one process.

The step has 16 virtual shards, four rounds or more. Some have no sequences, and one has no gradient. The
shards' gradients are those of a module in one process; a tree adds them. The first rank prints a JSON line
with the numbers of elements that differ in each rank, and what threads its process group has left.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from gloo import gloo_threads  # beside this script, as the next one
from zero_process import CONFIG
from zerokl.engine.config.run_config import OptimizerConfig
from zerokl.engine.train.master_weights import SlicedWeights
from zerokl.engine.train.optimizer import GradientOverflowError, Optimizer
from zerokl.engine.train.parallel import data_parallel
from zerokl.engine.train.parallel.fsdp import TreeReduceScatter
from zerokl.engine.train.parallel.gathered import WholeWeights
from zerokl.engine.train.parallel.gradient import GradientTree
from zerokl.engine.train.parallel.process_group import Ranks, join_ranks
from zerokl.engine.train.parallel.sharded_model import ShardedModel, ShardedWorkers
from zerokl.engine.train.parallel.spread import Cutting
from zerokl.engine.train.sharded_weights import ShardedWeights
from zerokl.files.bitwise import count_unequal
from zerokl.model.causal_lm import CausalLM
from zerokl.model.checkpoint import read_weights
from zerokl.model.decoder import Decoder, Numerics
from zerokl.model.prompts import PromptLayout
from zerokl.model.scoring import pack
from zerokl.model.weights import Layout

SHARDS, EMPTY, WITHOUT_GRADIENT = 16, {1, 4, 5, 6, 7, 11}, 9
CLIPPED = {
    dtype: OptimizerConfig(name=name, lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
    for dtype, name in {torch.float16: "muon", torch.bfloat16: "adamw", torch.float32: "adamw"}.items()
}


def make_pairs(seed: int) -> list[tuple[list[int], list[int]]]:
    """A prompt with two samples, one of a single token, and a longer one."""
    generator = torch.Generator().manual_seed(seed)

    def ids(n: int) -> list[int]:
        return torch.randint(0, CONFIG.vocab_size, (n,), generator=generator).tolist()

    first, second, third = ids(3 + seed % 16), ids(1), ids(20)
    return [(first, ids(5)), (first, ids(2)), (second, ids(3)), (third, ids(4))]


@dataclass(frozen=True)
class Work:
    """The sum of the logprobs of a shard's completions, times `scale`."""

    scale: float

    def has_gradient(self, shard: int) -> bool:
        return shard != WITHOUT_GRADIENT

    def one_pass(self, model: CausalLM, shard: int, backward: bool) -> float:
        pairs = make_pairs(shard)
        prompts = [prompt for prompt, _ in pairs]
        batch = pack(pairs, PromptLayout(prompts).prompt_of_sample)
        with torch.set_grad_enabled(backward):
            logp = model.score_inputs(model.inputs(batch, prompts=prompts)).logp
        if backward:
            (logp.sum() * self.scale).backward()
        return float(logp.detach().sum())


def shards_of(update: int) -> list[int | None]:
    return [None if i in EMPTY else i if i == WITHOUT_GRADIENT else i + 100 * update for i in range(SHARDS)]


class Alone:
    """The same in one process, over one flat tensor."""

    def __init__(self, folder: Path, layout: Layout, dtype: torch.dtype, device: torch.device):
        weights = read_weights(folder, layout).to(device)
        self.decoder = Decoder(layout.config, weights.to(dtype), layout)
        self.model = CausalLM.over(self.decoder)
        self.optimizer = Optimizer(SlicedWeights(self.decoder, weights), CLIPPED[dtype], 100)

    def gradient(self, work: Work, shards: list[int | None]) -> tuple[list[float | None], torch.Tensor]:
        tree, results = GradientTree(SHARDS), []
        for shard in shards:
            if shard is None:
                tree.push(None)
                results.append(None)
                continue
            results.append(work.one_pass(self.model, shard, backward=True))
            leaf = torch.zeros(self.decoder.layout.trained_numel, device=self.decoder.device)
            if work.has_gradient(shard):
                for name, view in self.decoder.layout.checkpoint_views(leaf).items():
                    view.copy_(self.model.get_parameter(name).grad)
            self.model.zero_grad()
            tree.push(leaf)
        return results, tree.take()


def compare(
    folder: Path, dtype: torch.dtype, ranks: Ranks, device: torch.device, updates: int = 2
) -> dict[str, int]:
    """Elements that differ after some updates, and in the overflow of one more."""
    layout, scale = Layout(CONFIG), 1024.0 if dtype == torch.float16 else 1.0
    cutting = Cutting.uncut(layout)
    model = ShardedModel(folder, cutting, dtype, Numerics(), dtype == torch.bfloat16, ranks, device)
    policy = Decoder(layout.config, torch.zeros(layout.numel, dtype=dtype, device=device), layout)
    whole = WholeWeights(model.gather_into, policy)
    ours = Optimizer(ShardedWeights(model, whole), CLIPPED[dtype], 100)
    workers, alone = ShardedWorkers(model, SHARDS), Alone(folder, layout, dtype, device)
    slices, unequal, work = ours.slices, dict.fromkeys(("gradient", "norm", "results"), 0), Work(scale)
    for update in range(updates):
        results, gradient = workers.sum_shards(work, shards_of(update))
        wanted_results, wanted = alone.gradient(work, shards_of(update))
        unequal["results"] += results != wanted_results
        unequal["gradient"] += count_unequal(gradient, wanted[slices.of_gradient(slices.own)])
        norms = ours.update(gradient, scale), alone.optimizer.update(wanted, scale)
        unequal["norm"] += norms[0] != norms[1]
    held = model.locals(), ours.moments
    unequal["persistent bytes"] = (
        sum(x.untyped_storage().nbytes() for xs in held for x in xs)
        + policy.flat.untyped_storage().nbytes()
        - 12 * model.pieces.numel
    )
    with whole.gathered():
        views = layout.checkpoint_views(policy.flat), layout.checkpoint_views(alone.decoder.flat)
        unequal["whole"] = sum(count_unequal(views[0][n].detach(), views[1][n].detach()) for n in views[0])
    roots = [
        [tree and tree.root for tree in (o.weights.hash(), o.hash_moments(), o.weights.hash_compute())]
        for o in (ours, alone.optimizer)
    ]
    unequal["ledger"] = sum(a != b for a, b in zip(*roots, strict=True))
    unequal["overflow"] = overflow(ours) != overflow(alone.optimizer)
    return {name: int(n) for name, n in unequal.items()}


def overflow(optimizer: Optimizer) -> str:
    part = optimizer.slices.of_gradient(optimizer.slices.own)
    gradient = torch.zeros(part.stop - part.start, device=optimizer.weights.decoder.device)
    places = [e.offset for name, e in optimizer.layout.entries.items() if name.endswith("down")]
    for place in places:
        if part.start <= place < part.stop:
            gradient[place - part.start] = float("inf")
    try:
        optimizer.update(gradient)
    except GradientOverflowError as error:
        return error.weight
    return ""


def plain_sum(self, output_tensor, input_tensor, group, op, async_op=False) -> None:
    """The sum of the ranks in their order: what a library might do."""
    if self.is_zero:
        input_tensor.zero_()
    received = torch.empty_like(input_tensor)
    dist.all_to_all_single(received, input_tensor, group=group)
    total = output_tensor.zero_()
    for x, has in zip(received.view(group.size(), -1).unbind(0), self.present, strict=True):
        total += x if has else 0.0


class Accumulated(GradientTree):
    """Rounds that are added one after another, as FSDP itself accumulates."""

    def push(self, leaf: torch.Tensor | None) -> None:
        if leaf is not None:
            root = self._levels.get(0)
            self._levels[0] = leaf.clone() if root is None else root + leaf
        self.pushed += 1


def main() -> None:
    folder, dtype, device = Path(sys.argv[1]), getattr(torch, sys.argv[2]), torch.device(sys.argv[3])
    with join_ranks(device.type == "cuda", always=True) as ranks:
        report = {"equal": compare(folder, dtype, ranks, device)}
        if ranks.size > 1:
            tree_sum, TreeReduceScatter.__call__ = TreeReduceScatter.__call__, plain_sum
            report["plain sum"] = compare(folder, dtype, ranks, device, 1)
            TreeReduceScatter.__call__ = tree_sum
        data_parallel.GradientTree = Accumulated
        report["accumulated"] = compare(folder, dtype, ranks, device, 1)
        reports = ranks.gather(lambda: report)
        ranks.barrier()
        first = ranks.first
    if first:
        print(json.dumps({"ranks": reports, "threads of gloo": gloo_threads()}))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    main()
