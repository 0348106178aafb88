"""Each rank keeps a slice of master weights and optimizer state; the bits are those of one process."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.kernels.block_digest import BLOCK
from zerokl.model.config import ModelConfig
from zerokl.model.weights import FLAT_TILE, Layout

from tests.engine.train.parallel.zero_process import CONFIG
from tests.forked import run_ranks

RANKS = 4


@given(st.integers(1, 16), st.integers(1, 4), st.sampled_from((1, 300, 5000, 9001)))
def test_slices_are_whole_blocks_side_by_side(n, layers, vocabulary):
    layout = Layout(
        ModelConfig.from_dict(CONFIG.raw | {"num_hidden_layers": layers, "vocab_size": vocabulary})
    )
    parts = layout.cut(n)
    assert (len(parts), parts[0].start, parts[-1].stop) == (n, 0, layout.numel)
    assert all(a.stop == b.start for a, b in pairwise(parts))
    flat = torch.arange(layout.numel)
    blocks = {}
    for part in parts:
        for name, start, stop in layout.blocks_in(part):
            assert 0 < stop - start <= BLOCK
            blocks.setdefault(name, []).append(flat[part][start:stop])
    whole = layout.checkpoint_views(flat)
    assert list(blocks) == list(whole)
    assert all(torch.equal(torch.cat(blocks[name]), whole[name].view(-1)) for name in whole)
    assert max(part.stop - part.start for part in parts) <= layout.numel / n + BLOCK + FLAT_TILE


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, marks=pytest.mark.full)
        for case in ("bfloat16 small", "float32 untied", "bfloat16 untied", "bfloat16 tied")
    ],
)
def report(request, tmp_path_factory) -> dict:
    """The JSON line of the first rank, with the lines of all ranks under the key `ranks`."""
    script = Path(__file__).with_name("zero_process.py")
    output = run_ranks(RANKS, [str(script), *request.param.split()], tmp_path_factory.mktemp("zero"))
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert len(lines) == RANKS, output
    empty = sum(start == stop for start, stop, *_ in lines[0]["slices"])
    assert empty == (2 if request.param == "bfloat16 small" else 0)
    return sorted(lines, key=lambda line: line["collected"] is None)[0] | {"ranks": lines}


def test_updates_over_slices_have_the_bits_of_one_process(report):
    """Nine updates; compared are master weights, compute weights, moments and the gradient's norm.

    In eight of the updates some rank has no root.
    """
    assert [line["differences"] for line in report["ranks"]] == [0] * RANKS
    assert [line["norms"] for line in report["ranks"]] == [0] * RANKS
    wrong = [line["wrong_order"] for line in report["ranks"]]
    assert sum(wrong) > 1000, "the control: the ranks' roots in another order must show"


def test_a_rank_adds_up_neighbours_and_exchanges_their_sum_once(report):
    """Over 2 and over 4 ranks, with as many exchanges as 16 shards have rounds."""
    for line in report["ranks"]:
        dimension_rounds = [got["rounds"] for got in line["dimensions"][1].values()]
        for ranks, rounds in [(RANKS, line["rounds"]), *((2, rounds) for rounds in dimension_rounds)]:
            assert {int(at_once) for at_once in rounds} == {n for n in (1, 2, 4, 8) if n * ranks <= 16}
            for at_once, (exchanges, unequal, _) in rounds.items():
                assert (exchanges, unequal) == (16 // ranks // int(at_once), 0)
    controls = [sum(control for *_, control in line["rounds"].values()) for line in report["ranks"]]
    assert sum(controls) > 1000, "the control: shards that are no neighbours must show"


def test_the_first_rank_collects_all(report):
    assert sorted((line["collected"] for line in report["ranks"]), key=str) == [0] + [None] * (RANKS - 1)


def test_a_rank_keeps_its_slice_only(report):
    end = 0
    for start, stop, *state, gradient in report["slices"]:
        assert start == end
        assert state == [stop - start] * 3, "master weights and two moments"
        assert 0 <= gradient - (stop - start) < FLAT_TILE
        end = stop
    assert end == report["numel"]
    sizes = [stop - start for start, stop, *_ in report["slices"]]
    if all(sizes):
        assert max(sizes) < report["numel"] / RANKS + BLOCK


def test_every_rank_names_the_weight_that_overflowed(report):
    assert [line["overflow"] for line in report["ranks"]] == ["model.layers.0.mlp.up_proj.weight"] * RANKS


def test_ranks_send_along_their_dimension_of_the_mesh_only(report):
    """Four ranks as a mesh of 2 x 2: each works with the other rank of its row or of its column."""
    for line in report["ranks"]:
        rank, dimensions = line["dimensions"]
        rows = {"dp": [rank % 2, rank % 2 + 2], "tp": [rank - rank % 2, rank - rank % 2 + 1]}
        assert {name: got["ranks"] for name, got in dimensions.items()} == rows
        for name, got in dimensions.items():
            assert (got["first"], got["wrong"]) == (rows[name][0], 0)
            owned = {r for r, (start, stop) in zip(rows[name], got["slices"], strict=True) if start < stop}
            assert set(got["shared"]) == owned
