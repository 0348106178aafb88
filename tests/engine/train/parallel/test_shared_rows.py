"""Ranks that share the rows of a forward have the scores and the gradient of one rank."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.docs._wire import Widths, sent_by_a_layer
from zerokl.engine.config.loss_section import LossConfig
from zerokl.engine.train.parallel.gradient import ShardSum
from zerokl.engine.train.parallel.process_group import Ranks
from zerokl.engine.train.parallel.spread import Cutting
from zerokl.engine.train.parallel.ulysses import ContextParts
from zerokl.engine.train.shard import Shard, ShardWork
from zerokl.kernels.grad import GradBuffer
from zerokl.kernels.matmul import add_outer
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.shared_rows import SharedRows
from zerokl.model.checkpoint import load_decoder
from zerokl.model.config import ModelConfig
from zerokl.model.context import PackedContext
from zerokl.model.decoder import Decoder
from zerokl.model.families import MODEL_TYPES
from zerokl.model.shared_context import SharedContext, sizes_of_rank
from zerokl.model.weights import Layout

from tests.engine.train.parallel.test_tensor_parts import ranks_of
from tests.engine.train.test_shards_in_flight import flat, step_of
from tests.helpers import DTYPES, property_settings, total_unequal
from tests.kernels.test_shared_sums import on_ranks
from tests.random_model import TWO_LAYERS, random_model

FOUR_HEADS = TWO_LAYERS | {"num_attention_heads": 8, "num_key_value_heads": 4}
# Several token blocks in a sequence, several sequences and prompts in a pass, and a prompt of one token.
LONG = [(1, 5), (3, 150), (3, 9), (40, 30), (40, 140), (61, 8)]
WORK = ShardWork(SamplingParams(), LossConfig(), 3, watch=True)


def dense() -> list[str]:
    mixed = ("num_experts", "num_local_experts", "n_routed_experts", "linear_num_key_heads", "q_lora_rank")
    return [name for name, family in MODEL_TYPES.items() if not any(x in family.small for x in mixed)]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return random_model(tmp_path_factory.mktemp("four"), FOUR_HEADS, 1.5)


def parts_of(layout: Layout, rank: int, n: int) -> ContextParts:
    grid = {"dp": ranks_of(0, 1), "cp": ranks_of(rank, n)}
    return ContextParts(layout.config, Cutting.uncut(layout), Ranks(ranks_of(rank, n).mesh, grid))


def alone(decoder: Decoder, step: Shard, work: ShardWork, part=None, shards: int = 2):
    """The scored shards, and the root of the tree."""
    sums = ShardSum(decoder, shards, 2, part=part)
    return sums.add(work, step.cut(shards)), sums.tree.take().clone()


def shared(decoder: Decoder, n: int, step: Shard, work: ShardWork):
    """What each of n ranks has scored, and the gradient that their parts make up."""
    layout = decoder.layout

    def of_rank(leaves):
        part = parts_of(layout, leaves.ranks.rank, n).part
        mine = Decoder(layout.config, decoder.flat.detach(), layout, recompute=decoder.recompute)
        return alone(mine, step, replace(work, shared=SharedRows(leaves.ranks)), part)

    whole, scored = torch.zeros(layout.trained_numel), []
    for rank, (results, root) in enumerate(on_ranks(n, of_rank)):
        parts, start = parts_of(layout, rank, n), 0
        vector = parts.vector(root)
        for a, b in parts.ranges:
            whole[a:b], start = vector[start : start + b - a], start + b - a
        scored.append(results)
    return scored, whole


def unequal(decoder: Decoder, n: int, step: Shard, work: ShardWork = WORK) -> tuple[int, int]:
    """Unequal scores and gradients of n ranks, beside one rank."""
    expected, gradient = alone(decoder, step, work)
    scored, whole = shared(decoder, n, step, work)
    first = flat(expected)
    scores = sum(total_unequal([flat(x)[0]], [first[0]]) + (flat(x)[1:] != first[1:]) for x in scored)
    assert whole.count_nonzero() > len(whole) // 2
    return scores, total_unequal([whole], [gradient])


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ranks_have_the_bits_of_one(four, dtype, n):
    decoder, step = load_decoder(four, dtype), step_of(LONG)
    assert unequal(decoder, n, step) == (0, 0)


def lost(scored: list) -> dict[str, int]:
    parts = [part for shard in scored if shard for part in shard]
    return {name: sum(part.underflow.get(name, 0) for part in parts) for name in ("norm", "embed")}


@pytest.mark.full
def test_ranks_count_the_zeros_of_one(four):
    decoder, step = load_decoder(four, torch.float16), step_of(LONG)
    work = replace(WORK, scale=2.0**-12)
    expected = lost(alone(decoder, step, work)[0])
    assert min(expected.values()) > 0
    assert [lost(scored) for scored in shared(decoder, 2, step, work)[0]] == [expected] * 2


@pytest.mark.full
@property_settings(3)
@given(
    samples=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 150)), min_size=1, max_size=6),
    micro_batch=st.integers(1, 6),
    n=st.sampled_from([2, 4]),
    recompute=st.booleans(),
)
def test_no_length_and_no_micro_batch_shows_the_ranks(four, samples, micro_batch, n, recompute):
    decoder = load_decoder(four, torch.bfloat16)
    decoder.recompute = recompute
    assert unequal(decoder, n, step_of(samples), replace(WORK, micro_batch=micro_batch, watch=False)) == (
        0,
        0,
    )


@pytest.mark.parametrize("family", dense())
@pytest.mark.full
def test_every_dense_family_has_the_bits_of_one(family, tmp_path):
    widths = FOUR_HEADS | {"model_type": family} | dict(MODEL_TYPES[family].small)
    decoder = load_decoder(random_model(tmp_path, widths, 1.5), torch.bfloat16)
    assert unequal(decoder, 2, step_of(LONG)) == (0, 0)


@pytest.mark.full
def test_frozen_weights_have_no_part(four):
    plain = load_decoder(four, torch.bfloat16)
    frozen = Layout(plain.config, ("layers.0.qkv", "layers.1.down", "norm"))
    values = torch.zeros(frozen.numel, dtype=plain.dtype)
    for name, view in frozen.views(values).items():
        view.copy_(plain.w[name].detach())
    assert unequal(Decoder(plain.config, values, frozen), 2, step_of(LONG)) == (0, 0)


def test_the_bytes_that_docs_scale_has_are_those_that_are_sent(four):
    n, lengths = 4, [100, 156]
    c = load_decoder(four, torch.bfloat16).config
    widths = Widths(
        c.layers,
        c.hidden_size,
        c.heads * c.head_dim,
        c.kv_heads * c.head_dim,
        c.intermediate_size,
        c.head_dim,
    )

    def sent(leaves):
        decoder, rows = load_decoder(four, torch.bfloat16), SharedRows(leaves.ranks)
        parts = parts_of(decoder.layout, leaves.ranks.rank, n)
        buffers = ShardSum(decoder, 1, part=parts.part).buffers
        whole = PackedContext(lengths, sizes_of_rank(c, rows), buffers=buffers)
        ids = rows.mine(torch.arange(sum(lengths)) % c.vocab_size)
        decoder.hidden(ids, SharedContext(whole, rows)).sum().backward()
        return leaves.ranks.sent

    T, D = sum(lengths), c.hidden_size
    # The ids and dx of the embedding, and the last norm.
    outside = (n - 1) * T // n * (8 + 2 * D) + (n - 1) * T // n // n * 4 * D
    expected = c.layers * sent_by_a_layer(n, T, widths) + outside
    assert on_ranks(n, sent) == [expected] * n


def in_another_order(buffer, dy, x, blocks):
    """The rows of two ranks swapped: the same terms, added in another order."""
    lengths = blocks.bounds[2]
    order = torch.cat([torch.arange(lengths // 2, lengths), torch.arange(lengths // 2)])
    add_outer(buffer, dy[order], x[order], blocks)


def rank_after_rank(buffer, dy, x, blocks):
    """Each half of the rows has a sum of its own, and these are added, as an all-reduce would."""
    for half in range(2):
        mine = (torch.arange(len(x)) * 2 // len(x) == half).unsqueeze(1)
        part = GradBuffer(torch.zeros_like(buffer.sums))
        add_outer(part, dy * mine, x * mine, blocks)
        buffer.zeroed(blocks.shards).add_(part.sums)


@pytest.mark.parametrize("fault", [in_another_order, rank_after_rank])
def test_control_another_order_of_a_gradients_rows_is_seen(four, fault, monkeypatch):
    decoder, step = load_decoder(four, torch.float32), step_of(LONG)
    expected, summed = alone(decoder, step, WORK)
    monkeypatch.setattr("zerokl.kernels.linear.add_outer", fault)
    scored, whole = shared(decoder, 2, step, WORK)
    assert all(total_unequal([flat(x)[0]], [flat(expected)[0]]) == 0 for x in scored)
    assert total_unequal([whole], [summed]) > len(whole) // 10


def test_control_positions_of_the_first_rank_in_each_are_seen(four, monkeypatch):
    decoder, step = load_decoder(four, torch.float32), step_of(LONG)
    expected, summed = alone(decoder, step, WORK)
    made = SharedContext.__init__

    def init(context, whole, shared):
        made(context, whole, shared)
        context.positions = whole.positions[: len(context.positions)]

    monkeypatch.setattr(SharedContext, "__init__", init)
    scored, whole = shared(decoder, 2, step, WORK)
    assert all(total_unequal([flat(x)[0]], [flat(expected)[0]]) > 0 for x in scored)
    assert total_unequal([whole], [summed]) > 0


@pytest.mark.parametrize(
    ("family", "ranks", "message"),
    [
        ("qwen3_moe", 2, "has experts, which are not built with shared rows; set it to 1"),
        ("qwen3_5_text", 2, "has gated delta nets, which"),
        ("deepseek_v3", 2, "has (experts|latent attention), which"),
        ("gpt_oss", 2, "has (experts|attention sinks), which"),
        ("qwen3", 8, r"must divide kv_heads \(4\); choose a smaller one"),
    ],
)
def test_models_that_do_not_share_rows_are_refused_in_one_line(family, ranks, message, tmp_path):
    widths = FOUR_HEADS | {"model_type": family} | dict(MODEL_TYPES[family].small)
    layout = Layout(ModelConfig.from_file(random_model(tmp_path, widths)))
    with pytest.raises(ValueError, match=rf"^parallel.context \({ranks}\).*{message}") as error:
        parts_of(layout, 0, ranks)
    assert "\n" not in str(error.value)
