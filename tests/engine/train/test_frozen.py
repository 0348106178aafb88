"""Frozen weights: they do not move and have no gradient, state or hash; the others keep their bits."""

from collections import Counter
from collections.abc import Collection

import pytest
import torch
from zerokl.engine.config.loss_section import LossConfig
from zerokl.engine.config.run_config import OptimizerConfig
from zerokl.engine.train.master_weights import SlicedWeights
from zerokl.engine.train.optimizer import Optimizer
from zerokl.engine.train.parallel.gradient import ShardSum
from zerokl.engine.train.parallel.workers import Workers
from zerokl.engine.train.shard import ShardWork
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import load_decoder
from zerokl.model.decoder import Decoder
from zerokl.model.weights import Layout

from tests.engine.train.test_shards_in_flight import step_of
from tests.helpers import DTYPES, total_unequal

STEP = step_of([(3, 5), (4, 9), (20, 8), (31, 7), (31, 2)])
WORK = ShardWork(SamplingParams(), LossConfig(), 2, watch=True)
SHARDS, OPTIMIZER = 4, OptimizerConfig(lr=1e-3, weight_decay=0.1, max_grad_norm=0.0)
FIRST_LAYER = [f"layers.0.{name}" for name in ("input_norm", "qkv", "q_norm", "k_norm", "o", "post_norm")]
CASES = (
    ["embed"],
    ["norm"],
    ["embed", *FIRST_LAYER, "layers.0.gate_up", "layers.0.down"],
    ["layers.1.qkv", "layers.1.q_norm", "layers.0.down"],
)


def decoder_of(model, dtype: torch.dtype, frozen: Collection[str]) -> Decoder:
    """The model's weights in a layout with frozen weights."""
    plain = load_decoder(model, dtype)
    layout = Layout(plain.config, frozen)
    flat = torch.zeros(layout.numel, dtype=dtype)
    for name, view in layout.views(flat).items():
        view.copy_(plain.w[name].detach())
    return Decoder(plain.config, flat, layout)


def gradient(decoder: Decoder, in_flight: int = 1) -> torch.Tensor:
    sums = ShardSum(decoder, SHARDS, in_flight)
    sums.add(WORK, STEP.cut(SHARDS))
    return sums.tree.take().clone()


def by_name(layout: Layout, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """The trained weights' views of a tensor [trained_numel]."""
    return {e.name: flat[e.offset : e.offset + e.numel].view(e.shape) for e in layout.trained}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("frozen", CASES, ids=lambda names: names[0] + f"-{len(names)}")
def test_frozen_weights_do_not_move_and_the_others_keep_their_bits(model, dtype, frozen):
    every_weight, decoder = decoder_of(model, dtype, ()), decoder_of(model, dtype, frozen)
    expected, before = gradient(every_weight), {n: w.detach().clone() for n, w in decoder.w.items()}
    summed = gradient(decoder)
    assert total_unequal([gradient(decoder, 3)], [summed]) == 0
    grads, expected_grads = by_name(decoder.layout, summed), by_name(every_weight.layout, expected)
    assert grads.keys() == expected_grads.keys() - set(frozen)
    # With tied embeddings the frozen embedding is the frozen lm_head.
    assert total_unequal(list(grads.values()), [expected_grads[name] for name in grads]) == 0

    masters = []
    for d, grad in ((every_weight, expected), (decoder, summed)):
        optimizer = Optimizer(SlicedWeights(d, d.flat.detach().float()), OPTIMIZER, 10)
        assert optimizer.moments[0].numel() == d.layout.trained_numel
        leaves = optimizer.weights.hash().leaves
        norm = optimizer.update(grad)["grad_norm"]
        assert norm == pytest.approx(float(grad.double().norm()), rel=1e-9)
        masters.append((d.layout.views(optimizer.weights.whole()), leaves))
    (every_master, every_leaf), (master, leaves) = masters
    assert total_unequal([master[n] for n in grads], [every_master[n] for n in grads]) == 0
    assert total_unequal([master[n] for n in frozen], [before[n].float() for n in frozen]) == 0
    assert total_unequal([decoder.w[n].detach() for n in frozen], [before[n] for n in frozen]) == 0
    assert all(total_unequal([master[n]], [before[n].float()]) > 0 for n in grads), "control: these moved"
    # A leaf for each tensor of the checkpoint that is trained, with the hash that it has among all.
    assert len(leaves) == sum(len(entry.parts) for entry in decoder.layout.trained)
    assert Counter(leaves) < Counter(every_leaf)


def test_workers_sum_what_is_trained(model):
    frozen = ["embed", "layers.1.down"]
    expected = gradient(decoder_of(model, torch.bfloat16, frozen))
    with Workers(decoder_of(model, torch.bfloat16, frozen), SHARDS, 2) as workers:
        summed = workers.sum_shards(ShardWork(SamplingParams(), LossConfig(), 2), STEP.cut(SHARDS))[1]
        assert total_unequal([summed], [expected]) == 0


def test_without_frozen_weights_the_layout_is_as_before_and_wrong_names_are_refused(model):
    config = load_decoder(model, torch.float32).config
    layout = Layout(config)
    assert layout.trained_numel == layout.numel
    assert [e.offset for e in layout.trained] == [e.offset for e in layout.entries.values()]
    with pytest.raises(ValueError, match=r"frozen \(embde\): embde is no weight of the model"):
        Layout(config, ["embde"])
    with pytest.raises(ValueError, match="no weight is left to train"):
        Layout(config, layout.entries)
