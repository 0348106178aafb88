"""LoRA: the gradient of A and B beside autograd in fp64, the merged weights, and the first adapters.

transformers' model with W + s B A as a plain expression is the independent implementation.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from zerokl.engine.config.loss_section import LossConfig
from zerokl.engine.config.run_config import OptimizerConfig
from zerokl.engine.train.master_weights import AdapterWeights
from zerokl.engine.train.optimizer import Optimizer
from zerokl.engine.train.parallel.workers import Workers
from zerokl.engine.train.shard import Shard, ShardWork
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.adapters import (
    PEFT_PREFIX,
    AdapterLayout,
    Adapters,
    adapted_layout,
    first_adapters,
)
from zerokl.model.checkpoint import read_weights
from zerokl.model.config import ModelConfig
from zerokl.model.decoder import Decoder
from zerokl.model.lora import TARGETS, Lora

from tests.engine.train.test_shards_in_flight import step_of
from tests.helpers import DTYPES, assert_at_most_twice_the_error, randn, total_unequal

STEP, SHARDS = step_of([(3, 5), (4, 9), (20, 8), (31, 7), (31, 2)]), 4
# A sum is cut alike in every dtype.
ONE_QUICK = [DTYPES[0], *(pytest.param(x, marks=pytest.mark.full) for x in DTYPES[1:])]
LORA = Lora(3, 5.0, ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))


def adapters_of(model: Path, dtype: torch.dtype, lora: Lora = LORA, trained: bool = True) -> Adapters:
    """Adapters of random A and B, or the first ones, merged into the model."""
    config = ModelConfig.from_file(model)
    layout = adapted_layout(config, lora)
    weights, adapter_layout = read_weights(model, layout), AdapterLayout(layout, lora)
    flat = first_adapters(adapter_layout, 0)
    if trained:
        for i, view in enumerate(adapter_layout.views(flat).values()):
            view.copy_(randn(i, *view.shape) * 0.1)
    return Adapters(adapter_layout, flat, weights, Decoder(config, weights.to(dtype), layout), torch.float32)


def gradient(adapters: Adapters, n: int = 1, micro_batch: int = 2, in_flight: int = 1) -> torch.Tensor:
    work = ShardWork(SamplingParams(), LossConfig(correction="none"), micro_batch)
    with Workers(adapters.decoder, SHARDS, n, in_flight=in_flight, adapters=adapters) as workers:
        return workers.sum_shards(work, STEP.cut(SHARDS))[1].clone()


def by_autograd(model: Path, adapters: Adapters, step: Shard, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The gradient of each A and B, by transformers and autograd in this dtype."""
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="eager").eval()
    base = {name: p.detach() for name, p in hf.named_parameters()}
    views = adapters.layout.checkpoint_views(adapters.flat)
    leaves = {name: view.to(dtype, copy=True).requires_grad_() for name, view in views.items()}
    merged = dict(base)
    for module in {name.removeprefix(PEFT_PREFIX).rsplit(".", 2)[0] for name in leaves}:
        a, b = (leaves[f"{PEFT_PREFIX}{module}.lora_{letter}.weight"] for letter in "AB")
        merged[f"{module}.weight"] = base[f"{module}.weight"] + (5 / 3) * (b @ a)
    loss = 0.0
    for rollout, A, weight in zip(step.rollouts, step.advantages, step.weights, strict=True):
        ids, start = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]]), len(rollout.prompt_ids)
        logits = torch.func.functional_call(hf, merged, (ids,)).logits[0, start - 1 : -1]
        logp = logits.log_softmax(-1).gather(1, ids[0, start:, None])
        loss = loss - weight * (torch.from_numpy(A).to(dtype)[:, None] * logp).sum()
    loss.backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


def together(views: Iterable[tuple[str, torch.Tensor]], letter: str) -> torch.Tensor:
    return torch.cat([x.reshape(-1) for name, x in views if f"lora_{letter}" in name])


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "unmerged"])
@pytest.mark.parametrize("trained", [True, False], ids=["random", "first"])
def test_the_gradient_is_that_of_autograd_in_fp64(model, trained, merge):
    adapters = adapters_of(model, torch.float32, LORA._replace(merge=merge), trained)
    ours = adapters.layout.checkpoint_views(gradient(adapters))
    plain, exact = (by_autograd(model, adapters, STEP, dtype) for dtype in (torch.float32, torch.float64))
    assert ours.keys() == exact.keys()
    for letter in "AB":
        grads = [together(views.items(), letter) for views in (ours, plain, exact)]
        assert_at_most_twice_the_error(*grads, letter)
        assert (grads[2].abs().max() > 0) == (trained or letter == "B"), "B = 0 has a gradient, A has none"


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "unmerged"])
@pytest.mark.parametrize("dtype", ONE_QUICK, ids=str)
def test_how_the_work_is_cut_decides_no_bit_of_the_gradient(model, dtype, merge):
    lora = LORA._replace(merge=merge)
    expected = gradient(adapters_of(model, dtype, lora))
    for cut in ({"n": 2}, {"micro_batch": 5}, {"in_flight": 4, "micro_batch": 3}):
        assert total_unequal([gradient(adapters_of(model, dtype, lora), **cut)], [expected]) == 0, cut
    other = adapters_of(model, dtype, lora)
    other.flat[0] += 0.5
    if merge:
        other.merge()
    assert total_unequal([gradient(other)], [expected]) > 0, "control"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_update_moves_the_adapters_and_merges_them(model, dtype):
    adapters = adapters_of(model, dtype, trained=False)
    base = read_weights(model, adapters.layout.model).to(dtype)
    decoder = adapters.decoder
    assert total_unequal([decoder.flat.detach()], [base]) == 0, "the first adapters change nothing"
    grad = gradient(adapters)
    optimizer = Optimizer(AdapterWeights(adapters), OptimizerConfig(lr=1e-2, max_grad_norm=0.0), 10)
    assert optimizer.moments[0].numel() == adapters.layout.numel
    before = adapters.flat.clone()
    norm = optimizer.update(grad)["grad_norm"]
    assert norm == pytest.approx(float(grad.double().norm()), rel=1e-9)
    views, changed = adapters.layout.checkpoint_views, adapters.flat != before
    assert all(changed[i].any() for i in _places(adapters, "B"))
    assert total_unequal([adapters.merged().to(dtype)], [decoder.flat.detach()]) == 0
    now, first = decoder.layout.checkpoint_views(decoder.flat.detach()), decoder.layout.checkpoint_views(base)
    for name in now:
        has_adapter = f"{PEFT_PREFIX}{name.removesuffix('.weight')}.lora_A.weight" in views(adapters.flat)
        assert (total_unequal([now[name]], [first[name]]) > 0) == has_adapter, name
    assert total_unequal([x for _, x in adapters.base_views()], list(_base(model, adapters))) == 0


def _places(adapters: Adapters, letter: str) -> list[slice]:
    entries = [getattr(adapter, letter.lower()) for adapter in adapters.layout.adapters]
    return [slice(e.offset, e.offset + e.numel) for e in entries]


def _base(model: Path, adapters: Adapters) -> Iterable[torch.Tensor]:
    layout = adapters.layout.model
    views = layout.checkpoint_views(read_weights(model, layout))
    return [views[name] for name, _ in adapters.base_views()]


def test_the_first_adapters_are_those_of_the_seed_whatever_the_targets(model):
    config = ModelConfig.from_file(model)

    def first(seed: int, targets: tuple[str, ...] = TARGETS) -> dict[str, torch.Tensor]:
        lora = Lora(4, 8.0, targets)
        layout = AdapterLayout(adapted_layout(config, lora), lora)
        return layout.checkpoint_views(first_adapters(layout, seed))

    whole, part = first(1), first(1, ("k_proj", "down_proj"))
    assert total_unequal(list(part.values()), [whole[name] for name in part]) == 0
    a = {name: x for name, x in whole.items() if "lora_A" in name}
    assert all(total_unequal([x], [first(2)[name]]) > 0 for name, x in a.items())
    for name, x in whole.items():
        if "lora_B" in name:
            assert not x.any()
        else:
            bound = x.shape[1] ** -0.5
            kaiming = torch.nn.init.kaiming_uniform_(torch.empty(4096, x.shape[1]), a=5**0.5)
            assert 0.8 * bound < x.abs().max() <= bound
            assert kaiming.abs().max() <= bound * 1.0001
    distinct = {tuple(x.view(-1)[:8].tolist()) for x in a.values()}
    assert len(distinct) == len(a) == 7 * config.layers
