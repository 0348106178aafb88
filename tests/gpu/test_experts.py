"""A mixture of experts on a fake GPU: no host waits for what the router chooses, and every shape is fixed."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from zerokl.engine.runs.init import preset_config
from zerokl.engine.train.parallel.gradient import ShardSum, TrainedAdapters
from zerokl.model.adapters import AdapterLayout, adapted_layout
from zerokl.model.blocks import experts
from zerokl.model.decoder import Decoder
from zerokl.model.lora import Lora
from zerokl.model.sizes import Experts

from tests.gpu.device import VOCABULARY, Device, Fault, gpu, model, model_of, plant
from tests.gpu.test_passes import LOGPROBS, SETTINGS, UPLOAD, make_shard
from tests.gpu.test_turns import generate
from tests.helpers import DTYPES

SPARSE = Experts(number=6, per_token=2, size=48, renormalise=True, layers=frozenset({1}))
# A small gpt-oss, whose matrices are transposed and have biases.
CLAMPED = preset_config(
    "gpt_oss",
    VOCABULARY,
    {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "layer_types": ["sliding_attention", "full_attention"]},
)
FORWARD = ("_topk_softmax_fwd", "_count_slots", "_sort_slots", "_grouped_matmul", "_sum_slots")
OF_CLAMPED = ("_clamped_swiglu_fwd", "_grouped_matmul", "_sum_slots", "_given_weights", "_sort_slots")
BACKWARD_OF_CLAMPED = ("_clamped_swiglu_bwd", "_add_bias_dots", "_add_expert_columns", "_sinks_bwd")
BACKWARD = ("_topk_softmax_bwd", "_combine_bwd", "_rows_of_tokens", "_runs_of_experts")


def train(dtype: torch.dtype, shards: int, setting: str = "plain") -> Device:
    with gpu() as device:
        chosen = SETTINGS[setting]
        options = {"recompute": True} if chosen.recompute else {}
        total = ShardSum(model(dtype, experts=SPARSE, **options), 64, shards)
        device.cuda.events.clear()
        total.add(chosen.work, [make_shard(i) for i in range(shards)])
    return device


def turns(dtype: torch.dtype, target: str = "sm_90", named: bool = False) -> Device:
    """named: completions name the experts of their tokens."""
    with gpu(target) as device:
        generate(model(dtype, experts=SPARSE), experts=named)
    return device


def names(device: Device) -> Counter[str]:
    return Counter(launch.kernel.__name__ for launch in device.launches)


@pytest.mark.parametrize("target", ["sm_90", "sm_80"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_host_does_nothing_in_a_captured_turn(dtype, target):
    device = turns(dtype, target)
    (graph,) = device.captures
    assert graph.replays >= 10
    assert device.in_graphs() == []
    assert all(names(device)[name] >= 4 for name in FORWARD)  # the prompts, and three turns


def test_the_experts_of_drawn_tokens_cost_no_further_wait():
    plain, named = turns(torch.bfloat16), turns(torch.bfloat16, named=True)
    assert named.in_graphs() == []
    for kind in ("wait", "upload"):
        assert named.places(kind) == plain.places(kind), kind


@pytest.mark.parametrize("setting", ["plain", "micro-batches", "layers computed again"])
@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_pass_waits_for_log_probabilities_only(dtype, shards, setting):
    device = train(dtype, shards, setting)
    assert device.places("wait") == {LOGPROBS}
    assert device.places("copy") == set()
    assert device.places("upload") == {UPLOAD}
    assert set(FORWARD) | set(BACKWARD) <= set(names(device))


@pytest.mark.parametrize("run", [turns, lambda dtype: train(dtype, 1)], ids=["turns", "pass"])
def test_control_a_look_at_the_experts_is_found(run, monkeypatch):
    """As if the tables were as long as the experts need."""

    def looks(plain, ids, *args):
        int(ids.max())
        return plain(ids, *args)

    place, line = "model/blocks/experts.py: MixtureOfExperts._mixture", "expert_rows(ids"
    fault = Fault(lambda patch: plant(patch, experts, "expert_rows", looks), place, line, "wait")
    fault.plant(monkeypatch)
    assert any(map(fault.named, run(torch.bfloat16).cuda.events))


def test_the_tables_are_as_long_as_any_routing_needs():
    with gpu() as device:
        generate(model(torch.bfloat16, experts=SPARSE))
    for launch in device.launches:
        if launch.kernel.__name__ == "_grouped_matmul":
            slots, tiles = launch.args[5:7]
            rows = len(slots)
            assert len(tiles) == rows // 64 + min(rows, SPARSE.number)


@pytest.mark.parametrize("setting", ["plain", "layers computed again"])
def test_a_pass_with_adapters_of_experts_waits_for_log_probabilities_only(setting):
    lora = Lora(2, 4.0)
    with gpu() as device:
        chosen = SETTINGS[setting]
        plain = model(torch.bfloat16, experts=SPARSE)
        layout = AdapterLayout(adapted_layout(plain.config, lora), lora)
        decoder = Decoder(plain.config, plain.flat, layout.model, recompute=chosen.recompute)
        adapters = TrainedAdapters(layout, torch.zeros(layout.numel, device=decoder.device))
        total = ShardSum(decoder, 64, 2, adapters)
        device.cuda.events.clear()
        total.add(chosen.work, [make_shard(i) for i in range(2)])
    assert device.places("wait") == {LOGPROBS}
    assert device.places("copy") == set()
    assert device.places("upload") == {UPLOAD}
    # Of gate, up and down: x a^T and dy b of all experts in one launch each, beside the model's own four, and
    # the sums of a and b of two shards.
    assert names(device)["_outer"] >= 3 * 2 * 2


def test_replayed_experts_of_prompts_and_samples_cost_no_further_wait():
    with gpu() as device:
        decoder = model(torch.bfloat16, experts=SPARSE)
        shard = make_shard(0)
        named = [
            replace(r, experts=np.zeros((len(r.ids) - 1, 1, 2), np.uint8) + np.arange(2, dtype=np.uint8))
            for r in shard.rollouts
        ]
        work = replace(SETTINGS["plain"].work, replayed=True)
        total = ShardSum(decoder, 64, 1)
        device.cuda.events.clear()
        total.add(work, [replace(shard, rollouts=named)])
    assert device.places("wait") == {LOGPROBS}
    assert device.places("upload") == {UPLOAD}
    assert 2 * names(device)["_given_weights"] == names(device)["_topk_softmax_fwd"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpt_oss_costs_no_further_wait_in_a_pass_and_none_in_a_captured_turn(dtype):
    with gpu() as device:
        generate(model_of(CLAMPED, dtype))
    (graph,) = device.captures
    assert graph.replays >= 10
    assert device.in_graphs() == []
    assert all(names(device)[name] >= 4 for name in OF_CLAMPED)
    with gpu() as device:
        total = ShardSum(model_of(CLAMPED, dtype), 64, 4)
        device.cuda.events.clear()
        total.add(SETTINGS["plain"].work, [make_shard(i) for i in range(4)])
    assert device.places("wait") == {LOGPROBS}
    assert device.places("copy") == set()
    assert device.places("upload") == {UPLOAD}
    assert set(OF_CLAMPED) | set(BACKWARD_OF_CLAMPED) <= set(names(device))
