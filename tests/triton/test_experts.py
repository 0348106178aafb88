"""A mixture of experts on Triton, interpreted: vLLM's own fused_moe_kernel, and written-out arithmetic."""

import types
from dataclasses import replace

import pytest
import torch
from zerokl.kernels import matmul_triton, tiles
from zerokl.kernels.expert_rows_triton import sort_slots, sum_slots
from zerokl.kernels.given_softmax import given_softmax
from zerokl.kernels.given_softmax_triton import given_softmax_fwd
from zerokl.kernels.grad import GradBuffer
from zerokl.kernels.grouped_linear_triton import add_grouped_outer, grouped_matmul
from zerokl.kernels.launch import recorded_launches
from zerokl.kernels.order import token_blocks
from zerokl.kernels.silu_mul_triton import silu_mul_fwd
from zerokl.kernels.topk_softmax_triton import topk_softmax_fwd

from tests.helpers import DTYPES, randint, randn, total_unequal
from tests.law import accuracy, gradients
from tests.triton.written_out import written_out_topk

# Widths with several tiles along K and along N, and uneven rests.
D, INNER, EXPERTS, CHOSEN = 80, 72, 7, 3


@pytest.fixture(scope="module")
def fused_moe(batch_invariant) -> types.ModuleType:
    """vLLM's module of the experts' products. Its batch-invariant mode is on."""
    import vllm.model_executor.layers.fused_moe.fused_moe as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.envs, "VLLM_BATCH_INVARIANT", True)
        yield module


def routed(T: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing weights and experts of T tokens. Many logits are equal, and one expert has no tokens."""
    logits = randn(T, T, EXPERTS).mul(2).round() / 2
    logits[:, 4] = -9.0
    return topk_softmax_fwd(logits.to(dtype), CHOSEN, True)[:2]


def inputs(T: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x [T, D], the matrices of gate and up [E, 2I, D], and those of down [E, D, I]."""
    shapes = (T, D), (EXPERTS, 2 * INNER, D), (EXPERTS, D, INNER)
    return [randn(i, *shape, dtype=dtype, scale=shape[-1] ** -0.25) for i, shape in enumerate(shapes)]


def experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, q: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    rows = sort_slots(ids, EXPERTS)
    h = silu_mul_fwd(grouped_matmul(x, gate_up, rows, x_of_tokens=True))
    return sum_slots(grouped_matmul(h, down, rows, x_of_tokens=False, q_Tk=q), rows)


def aligned(ids: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What vLLM's compiled moe_align_block_size gives: slots by expert, each expert's padded to a block."""
    flat, slots, block_experts = ids.flatten(), [], []
    for expert in range(EXPERTS):
        expert_slots = (flat == expert).nonzero()[:, 0].tolist()
        blocks = -(-len(expert_slots) // block)
        slots += expert_slots + [ids.numel()] * (blocks * block - len(expert_slots))
        block_experts += [expert] * blocks
    as_int32 = (torch.tensor(x, dtype=torch.int32) for x in (slots, block_experts, [len(slots)]))
    return tuple(as_int32)


def vllm_product(
    module: types.ModuleType,
    x: torch.Tensor,
    w: torch.Tensor,
    q: torch.Tensor,
    ids: torch.Tensor,
    x_of_tokens: bool,
    weigh: bool,
    **config: int,
) -> torch.Tensor:
    """vLLM's product of each slot, [T, k, N], with the configuration of its batch-invariant mode."""
    (E, N, _), k = w.shape, ids.shape[1]
    chosen = module.try_get_optimal_moe_config((E, 2 * INNER, D), (E, D, INNER), k, None, len(ids)) | config
    y = torch.empty(*ids.shape, N, dtype=x.dtype)
    module.invoke_fused_moe_triton_kernel(
        *(x, w, y, None, None, q),
        *aligned(ids, chosen["BLOCK_SIZE_M"]),
        mul_routed_weight=weigh,
        top_k=k if x_of_tokens else 1,
        config=chosen,
        compute_type=getattr(module.tl, str(x.dtype).removeprefix("torch.")),
        **dict.fromkeys(("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16"), False),
        per_channel_quant=False,
    )
    return y


def vllm_experts(
    module: types.ModuleType,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    q: torch.Tensor,
    ids: torch.Tensor,
    **config: int,
) -> torch.Tensor:
    gu = vllm_product(module, x, gate_up, q, ids, x_of_tokens=True, weigh=False, **config)
    h = silu_mul_fwd(gu.view(-1, gu.shape[-1]))
    y = vllm_product(module, h, down, q, ids, x_of_tokens=False, weigh=True, **config)
    total = torch.zeros(len(x), D)
    for slot in y.unbind(1):  # as vLLM's compiled moe_sum
        total += slot.float()
    return total.to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T", [1, 70])
def test_bits_of_vllms_kernel(fused_moe, T, dtype):
    x, *w = inputs(T, dtype)
    routing = routed(T, dtype)
    assert total_unequal([experts(x, *w, *routing)], [vllm_experts(fused_moe, x, *w, *routing)]) == 0


def test_control_another_tile_along_k_gives_other_bits(fused_moe):
    x, *w = inputs(40, torch.float32)
    routing = routed(40, torch.float32)
    other = vllm_experts(fused_moe, x, *w, *routing, BLOCK_SIZE_K=64)
    assert total_unequal([experts(x, *w, *routing)], [other]) > 0


def test_control_a_rounding_before_the_weight_or_another_order_of_the_slots_gives_other_bits():
    (x, gate_up, down), (q, ids) = inputs(40, torch.bfloat16), routed(40, torch.bfloat16)
    rows, y = sort_slots(ids, EXPERTS), experts(x, gate_up, down, q, ids)
    h = silu_mul_fwd(grouped_matmul(x, gate_up, rows, x_of_tokens=True))
    by_slot = grouped_matmul(h, down, rows, x_of_tokens=False)[rows.places.long()]  # rounded
    weighed = (by_slot.float() * q.unsqueeze(2)).to(x.dtype).float()
    assert total_unequal([y], [((weighed[:, 0] + weighed[:, 1]) + weighed[:, 2]).to(x.dtype)]) > 0
    wide = grouped_matmul(h.float(), down.float(), rows, x_of_tokens=False, q_Tk=q)
    backwards = wide[rows.places.flip(1).long()]
    other = (backwards[:, 0] + backwards[:, 1]) + backwards[:, 2]
    assert total_unequal([sum_slots(wide, rows)], [other]) > 0


def test_the_configuration_is_vllms(fused_moe):
    for T in (1, 64, 5000):
        config = fused_moe.get_default_config(T, 128, 768, 2048, 8, None)
        block_m = tiles.grouped_rows(8 * T, 128)
        for dtype in DTYPES:
            ours = tiles.grouped_tiles(block_m, dtype, "hopper")
            assert ours.block_k == config["BLOCK_SIZE_K"]
            assert ours.block_m % config["BLOCK_SIZE_M"] == 0


@pytest.mark.parametrize("E", [1, 6, 64])
@pytest.mark.parametrize("T", [0, 1, 400])
def test_rows_are_those_of_the_reference(T, E):
    k = min(3, E)
    ids = (
        torch.stack([torch.randperm(E)[:k] for _ in range(T)]) if T else torch.zeros(0, k, dtype=torch.int64)
    )
    rows, slots = sort_slots(ids, E), ids.flatten()
    order = slots.sort(stable=True).indices
    assert rows.slots.tolist() == order.tolist()
    assert rows.places.flatten()[order].tolist() == list(range(T * k))
    assert rows.first.tolist() == [0, *slots.bincount(minlength=E).cumsum(0).tolist()]
    covered = [(expert, row) for expert, start, end in rows.tiles.tolist() for row in range(start, end)]
    assert covered == [(expert, row) for row, expert in enumerate(slots[order].tolist())]
    assert all(end - start <= rows.block_m for _, start, end in rows.tiles.tolist())


def test_one_expert_for_all_tokens_is_taken():
    """There is no capacity: the table of the tiles is as long as the worst case."""
    rows = sort_slots(torch.full((1000, 1), 5), 128)
    assert rows.tiles[:, 2].max() == 1000
    assert len(rows.tiles) == 1000 // 64 + 128


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_the_row_tile_decides_no_bit(dtype, monkeypatch):
    x, *w = inputs(130, dtype)
    ids = torch.arange(CHOSEN).expand(130, -1)
    q, results = randn(9, 130, CHOSEN), []
    for block_m in (64, 128):
        monkeypatch.setattr(
            "zerokl.kernels.expert_rows_triton.grouped_rows", lambda *_, block_m=block_m: block_m
        )
        results.append(experts(x, *w, q, ids))
    assert total_unequal(results[:1], results[1:]) == 0


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("E", "k"), [(1, 1), (6, 6), (64, 8), (128, 8), (512, 10)])
def test_the_router_has_the_written_out_bits(E, k, dtype, renormalise):
    logits = randn(E, 8, E, dtype=dtype, scale=2.0)
    logits[4:] = logits[4:].mul(2).round() / 2  # many are equal
    assert (
        total_unequal(topk_softmax_fwd(logits, k, renormalise)[:2], written_out_topk(logits, k, renormalise))
        == 0
    )


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("E", "k"), [(6, 2), (128, 8)])
def test_given_experts_have_the_routers_bits_and_others_the_reference_gradient(E, k, dtype, renormalise):
    """Those that the router would choose; then others, beside the reference in fp64."""
    logits = randn(E, 5, E, dtype=dtype, scale=2.0)
    w, ids, p = topk_softmax_fwd(logits, k, renormalise)
    assert total_unequal(given_softmax_fwd(logits, ids, renormalise), [w, p]) == 0
    others, dw = randn(3, 5, E).argsort(1)[:, :k].contiguous(), randn(4, 5, k)
    assert total_unequal([given_softmax_fwd(logits, others, renormalise)[0]], [w]) > 0
    grads = []
    for as_fp64 in (False, True):
        z = logits.to(torch.float64 if as_fp64 else torch.float32, copy=True).requires_grad_()
        given_softmax(z, others, renormalise).backward(dw.double() if as_fp64 else dw)
        grads.append(z.grad.double())
    assert (grads[0] - grads[1]).abs().max() < 4e-7 * grads[1].abs().max()


def test_control_another_rule_for_ties_or_another_order_is_found():
    logits = randn(0, 20, 64).mul(2).round() / 2
    ours = topk_softmax_fwd(logits, 8, True)
    assert total_unequal([ours[1]], [written_out_topk(logits, 8, True, ties=-1)[1]]) > 0
    assert total_unequal([ours[0]], [topk_softmax_fwd(logits.bfloat16(), 8, True)[0]]) > 0  # other lanes


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("renormalise", [True, False])
def test_a_logit_that_is_not_finite_makes_the_weights_of_its_token_nan(renormalise, bad):
    logits = randn(0, 3, 6)
    finite, _, _ = topk_softmax_fwd(logits, 2, renormalise)
    logits[1, 4] = bad
    w, ids, p = topk_softmax_fwd(logits, 2, renormalise)
    assert w.isnan().tolist() == [[False] * 2, [True] * 2, [False] * 2]
    assert p[1].isnan().all()
    assert ids[1].tolist() == [0, 1]
    assert total_unequal([w[::2]], [finite[::2]]) == 0
    assert given_softmax_fwd(logits, ids, renormalise)[0].isnan().tolist() == w.isnan().tolist()


LENGTHS = (40, 9, 3)


def gradients_of(
    dtype: torch.dtype, micro_batches: list[list[int]], op: gradients.Op = gradients.OPS["experts"]
) -> list[torch.Tensor]:
    """The fp32 sums. The widths are such that TMA sums the gradients in 16 bits."""
    return gradients.summed_grads(op, dtype, D, LENGTHS, micro_batches)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_gradients_do_not_depend_on_the_micro_batch(dtype):
    with recorded_launches(and_run=True) as launches:
        together = gradients_of(dtype, [[0, 1, 2]])
    assert total_unequal(together, gradients_of(dtype, [[0], [1, 2]])) == 0
    kernels = {launch.kernel.__name__ for launch in launches}
    assert ("_outer" if dtype == torch.float32 else "_outer_tma") in kernels
    assert kernels > {
        "_combine_bwd",
        "_rows_of_tokens",
        "_runs_of_experts",
        "_topk_softmax_bwd",
        "_sum_slots",
    }


def test_shards_of_one_pass_have_the_gradients_of_a_pass_each():
    op, shards = gradients.OPS["experts"], [[20, 9], [1], [17]]
    together, alone = (
        gradients.shard_grads(op, torch.float32, D, shards, together) for together in (True, False)
    )
    assert total_unequal(together, alone) == 0
    assert all(grad.any() for buffer in together for grad in buffer)


def test_control_another_order_of_the_sequences_or_blocks_across_them_are_found():
    before, op = gradients_of(torch.float32, [[0, 1, 2]]), gradients.OPS["experts"]
    assert total_unequal(before, gradients_of(torch.float32, [[2], [0, 1]])) > 0
    one = token_blocks([sum(LENGTHS)])
    across = op._replace(run=lambda x, ids, w, in_pass: op.run(x, ids, w, replace(in_pass, blocks=one)))
    assert total_unequal(before[1:], gradients_of(torch.float32, [[0, 1, 2]], across)[1:]) > 0


def outer(
    dtype: torch.dtype, ids: torch.Tensor, lengths: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weight gradient of 5 experts [5, 48, D], whose buffer held NaN, with its dy and x by rows."""
    rows = sort_slots(ids, 5)
    dy, x = (randn(i, ids.numel(), width, dtype=dtype) for i, width in enumerate((48, D)))
    buffer = GradBuffer(torch.full((1, 5 * 48, D), float("nan")), empty=[0])
    add_grouped_outer(buffer, dy, x, rows, token_blocks(lengths))
    return buffer.sums.view(5, 48, D), dy, x


def test_an_experts_gradient_is_that_of_a_product_over_its_tokens():
    lengths = [90, 3, 60]
    ids = torch.stack([randint(1, 2, 153), 2 + randint(2, 2, 153)], 1)  # experts 0 to 3 of 5
    dw, dy, x = outer(torch.float32, ids, lengths)
    start = 0
    for expert, dw_e in enumerate(dw):
        counts = [int((part == expert).sum()) for part in ids.split(lengths)]
        alone, end = torch.zeros(1, 48, D), start + sum(counts)
        matmul_triton.add_outer(alone, dy[start:end], x[start:end], token_blocks(counts))
        assert total_unequal([dw_e], [alone[0]]) == 0
        assert dw_e.any() == (expert < 4)
        start = end


def test_tma_decides_no_bit_of_an_experts_gradient(monkeypatch):
    ids = torch.stack([randint(1, 2, 153), 2 + randint(2, 2, 153)], 1)
    through_tma = outer(torch.bfloat16, ids, [90, 3, 60])[0]
    monkeypatch.setattr("zerokl.kernels.grouped_linear_triton.outer_readable", lambda *_: False)
    assert total_unequal([outer(torch.bfloat16, ids, [90, 3, 60])[0]], [through_tma]) == 0
    other = outer(torch.bfloat16, ids, [93, 60])[0]
    assert total_unequal([other], [through_tma]) > 0, "control: the sequences decide bits"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("experts", torch.float32), ("experts without renormalisation", torch.bfloat16)],
    ids=str,
)
def test_error_is_at_most_twice_that_of_plain_torch(name, dtype):
    """The largest of the errors with a few tokens: the interpreter takes milliseconds for each program."""
    shapes = ((40, 64), (40, 6), *accuracy.OPS[name].shapes[2:])
    accuracy.assert_accurate(accuracy.OPS[name]._replace(shapes=shapes), dtype, range(0, 40, 20))
