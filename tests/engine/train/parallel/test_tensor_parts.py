"""Where the parts of ranks that share layers lie: all of the model once, vectors in each rank."""

from types import SimpleNamespace

import pytest
import torch
from zerokl.engine.train.parallel.process_group import Ranks
from zerokl.engine.train.parallel.spread import Spread, merged
from zerokl.engine.train.parallel.tensor import TensorParts
from zerokl.model.config import ModelConfig
from zerokl.model.families import MODEL_TYPES
from zerokl.model.weights import Layout

from tests.engine.runs.test_leaf_runs import EIGHT_HEADS
from tests.helpers import randn, total_unequal
from tests.random_model import random_model


def ranks_of(rank: int, size: int) -> Ranks:
    return Ranks(SimpleNamespace(get_local_rank=lambda: rank, size=lambda: size))


def parts_of(layout: Layout, rank: int, data: int, tensor: int) -> TensorParts:
    grid = {"dp": ranks_of(rank // tensor, data), "tp": ranks_of(rank % tensor, tensor)}
    return TensorParts(layout, Ranks(ranks_of(rank, data * tensor).mesh, grid))


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "phi3"])
def layout(request, tmp_path_factory) -> Layout:
    widths = EIGHT_HEADS | {"model_type": request.param} | dict(MODEL_TYPES[request.param].small)
    return Layout(ModelConfig.from_file(random_model(tmp_path_factory.mktemp("parts"), widths)))


@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (1, 8), (2, 2), (4, 2)])
def test_every_weight_is_in_one_part_and_vectors_are_in_each(layout, data, tensor):
    whole, owners = randn(0, layout.numel), torch.zeros(layout.numel, dtype=torch.int64)
    for rank in range(data * tensor):
        parts = parts_of(layout, rank, data, tensor)
        for a, b in parts.ranges:
            owners[a:b] += 1
        vector = parts.vector(parts.cut(whole)[parts.own.own])
        assert total_unequal([vector], [torch.cat([whole[a:b] for a, b in parts.ranges])]) == 0
    for name, view in layout.views(owners).items():
        whole_in_each = view.dim() == 1 and name.rpartition(".")[2] != "qkv_bias"
        assert (view == (tensor if whole_in_each else 1)).all(), name


def test_a_part_has_whole_heads_and_the_same_columns_of_gate_and_up(layout):
    whole = torch.arange(layout.numel)
    first, second = (parts_of(layout, rank, 1, 2) for rank in range(2))
    views = layout.views(whole)
    for rank, parts in enumerate((first, second)):
        part = parts.part.views(parts.cut(whole))
        q, k, v = views["layers.1.qkv"].split([len(views["layers.1.qkv"]) // 3] * 3)
        rows = [x.chunk(2)[rank] for x in (q, k, v)]
        assert torch.equal(part["layers.1.qkv"], torch.cat(rows))
        assert torch.equal(part["layers.1.down"], views["layers.1.down"].chunk(2, 1)[rank])


def test_ranges_side_by_side_are_one():
    assert merged([(0, 2), (2, 5), (6, 7), (7, 7), (7, 9)]) == [(0, 5), (6, 9)]
    assert merged([]) == []


def test_frozen_weights_are_cut_like_others_and_are_in_no_slice(layout):
    frozen = Layout(layout.config, ("layers.0.down", "layers.1.qkv", "layers.1.input_norm"))
    whole, views = torch.arange(frozen.numel), layout.views(torch.arange(layout.numel))
    by_name = frozen.views(whole)
    assert views.keys() == by_name.keys()
    for rank in range(2):
        parts = parts_of(frozen, rank, 1, 2)
        part = parts.part.views(parts.cut(whole))
        assert parts.part.frozen == frozen.frozen
        assert torch.equal(part["layers.0.down"], by_name["layers.0.down"].chunk(2, 1)[rank])
        assert torch.equal(part["layers.1.input_norm"], by_name["layers.1.input_norm"])
        q, k, v = by_name["layers.1.qkv"].chunk(3)
        assert torch.equal(part["layers.1.qkv"], torch.cat([x.chunk(2)[rank] for x in (q, k, v)]))
        assert parts.ranges[-1][1] <= frozen.trained_numel


def test_a_joined_model_has_its_frozen_weights(layout, monkeypatch):
    frozen = Layout(layout.config, ("layers.0.down", "layers.1.qkv", "embed"))
    whole, parts = torch.zeros(frozen.numel), [parts_of(frozen, rank, 1, 2) for rank in range(2)]
    for name, view in frozen.views(whole).items():
        view.copy_(randn(len(name), *view.shape))

    def write(spread, flat, vector):  # what each rank broadcasts, without a broadcast
        start = 0
        for a, b in spread.ranges:
            flat[a:b], start = vector[start : start + b - a], start + b - a

    monkeypatch.setattr(Spread, "gather_into", write)
    first, second = (each.joined(each.cut(whole)) for each in parts)
    # A weight that no rank cuts is in both; a part of any other in one.
    assert total_unequal([torch.where(first == 0, second, first)], [whole]) == 0
