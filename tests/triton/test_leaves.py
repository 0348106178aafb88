"""Sums by leaves on Triton, interpreted: those of slices, of any number of ranks, and of the reference."""

import threading

import pytest
import torch
import torch.nn.functional as F
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import GenerationParams, RngKey, complete
from zerokl.kernels import matmul_leaves_triton
from zerokl.kernels.launch import launch
from zerokl.kernels.leaves import Leaves
from zerokl.kernels.matmul_triton import matmul
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.tile_tables import DEFAULT_TABLE, TileTable
from zerokl.model.config import ModelConfig
from zerokl.model.decoder import Decoder, Numerics
from zerokl.model.scoring import logprobs, pack
from zerokl.model.weights import Layout

from tests.helpers import DTYPES, assert_at_most_twice_the_error, randn, total_unequal
from tests.kernels.test_leaves import chain, pairs, rounded
from tests.kernels.test_shared_sums import COUNT, block, head, on_ranks
from tests.triton.launchers import LAUNCHERS
from tests.triton.test_model import RAW

N = 48
# Several tiles along K in a leaf, uneven ones, and pieces of three parts.
WIDTHS = [(80, 80), *(pytest.param(x, marks=pytest.mark.full) for x in ((1056,), (256, 128, 128)))]
# The interpreter takes seconds for each.
SOME = [x if x is torch.bfloat16 else pytest.param(x, marks=pytest.mark.proof) for x in DTYPES]


def by_slices(x, w, widths, count, join=pairs, block_k=64):
    """Each leaf is a product of copies of its pieces, each filled with zeros to whole tiles."""

    def leaf(i, operand):
        pieces = [part.chunk(count, 1)[i] for part in operand.split(widths, 1)]
        return torch.cat([F.pad(piece, (0, -piece.shape[1] % block_k)) for piece in pieces], 1)

    return join([matmul(leaf(i, x), leaf(i, w), rounded=False) for i in range(count)])


@pytest.mark.parametrize("dtype", SOME, ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_a_product_has_the_bits_of_its_slices(widths, dtype):
    x, w = randn(1, 9, sum(widths), dtype=dtype), randn(2, N, sum(widths), dtype=dtype)
    block_k = 32 if dtype == torch.float32 else 64
    for count in (2, 8):
        ours = matmul_leaves_triton.matmul_leaves(x, w.t().contiguous().t(), count, widths)
        assert total_unequal([ours], [by_slices(x, w, widths, count, block_k=block_k)]) == 0
    for control in (chain, rounded):
        assert total_unequal([ours], [by_slices(x, w, widths, 8, control, block_k)]) > 0


def test_the_tile_is_that_of_the_whole_matrix():
    table = TileTable("test", {"hopper": {128: ((N, 1024),)}})
    x, w = randn(1, 3, 1024, dtype=torch.bfloat16), randn(2, N, 1024, dtype=torch.bfloat16)
    whole = matmul_leaves_triton.matmul_leaves(x, w, 2, (1024,), table)
    halves = list(zip(x.chunk(2, 1), w.chunk(2, 1), strict=True))
    parts = [matmul_leaves_triton.matmul_leaves(*half, 1, (512,), table, 2) for half in halves]
    assert total_unequal([whole], [pairs(parts)]) == 0
    alone = [matmul_leaves_triton.matmul_leaves(*half, 1, (512,), table) for half in halves]
    assert total_unequal([whole], [pairs(alone)]) > 0, "control: a tile of the part's own"
    assert DEFAULT_TABLE.block_k(4096, 2048, "hopper") == 128, "there is such a matrix"


@pytest.fixture
def one_launch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter knows one program of one kernel, and the ranks are threads."""
    lock = threading.Lock()

    def locked(*args, **options):
        with lock:
            launch(*args, **options)

    for module in LAUNCHERS:
        monkeypatch.setattr(module, "launch", locked)


@pytest.mark.parametrize("dtype", SOME, ids=str)
@pytest.mark.parametrize(
    "n", [pytest.param(2, marks=pytest.mark.full), pytest.param(8, marks=pytest.mark.proof)]
)
def test_few_heads_and_columns_have_the_bits_of_all(one_launch_at_a_time, n, dtype):
    alone = block(Leaves(COUNT), dtype)
    ranks = on_ranks(n, lambda leaves: block(leaves, dtype))
    for rank in ranks:
        assert total_unequal(rank[0], alone[0]) == 0
    for group, dim in ((1, 0), (2, 0), (3, 1)):
        joined = [torch.cat(parts, dim) for parts in zip(*(rank[group] for rank in ranks), strict=True)]
        assert total_unequal(joined, alone[group]) == 0


@pytest.mark.parametrize("dtype", SOME, ids=str)
def test_a_part_of_the_vocabulary_has_the_bits_of_all(one_launch_at_a_time, dtype):
    params = SamplingParams(0.7)
    alone, w = head(Leaves(COUNT), dtype, params, 0.0)
    ranks = on_ranks(2, lambda leaves: head(leaves, dtype, params, 0.0))
    assert all(total_unequal(rank, alone) == 0 for rank, _ in ranks)
    assert total_unequal([torch.cat([part for _, part in ranks])], [w]) == 0
    ones, _ = head(Leaves(1), dtype, params, 0.0)
    assert total_unequal(ones, alone) > 0, "control: one leaf is another order"


def test_accuracy_is_that_of_one_sum():
    x, w = randn(1, 9, 528), randn(2, N, 528)
    ours = matmul_leaves_triton.matmul_leaves(x, w, 8, (528,))
    assert_at_most_twice_the_error(ours, x @ w.t(), x.double() @ w.double().t(), "by leaves")


@pytest.mark.full
@pytest.mark.parametrize("dtype", SOME, ids=str)
@pytest.mark.parametrize("params", [SamplingParams(0.7), SamplingParams(1.0, top_p=0.9)], ids=str)
def test_a_model_scores_what_it_draws(dtype, params):
    config = ModelConfig.from_dict(RAW | {"vocab_size": 64})
    layout = Layout(config)
    flat = randn(0, layout.numel, scale=0.15).to(dtype)
    decoder = Decoder(config, flat, layout, Numerics(leaves=Leaves(2)))
    prompts = [[1, 2, 3], [40] * 4]
    rollouts = complete(
        NativeSampler(decoder), prompts, GenerationParams(params, 1, 3, frozenset()), RngKey(0, 0)
    )
    batch = pack([rollout.pair for rollout in rollouts])
    with torch.no_grad():
        logp, _ = logprobs(decoder, batch, params)
    drawn = torch.cat([torch.from_numpy(rollout.logprobs) for rollout in rollouts])
    assert total_unequal([logp], [drawn]) == 0
