"""Attention on Triton, interpreted, has the bits of vLLM's kernel, keeps the law and is accurate.

The law is that prefill, chunks and decode are one result, and that gradients do not depend on other
sequences. Accuracy is judged against fp64.
"""

import numpy as np
import pytest
import torch
from zerokl.kernels import attention_bwd_triton, attention_triton
from zerokl.kernels.attention_plan import KEY_TILE
from zerokl.kernels.attention_tables import Spans
from zerokl.kernels.attention_triton import attention_paged

from tests.helpers import assert_at_most_twice_the_error, randn, total_unequal
from tests.kernels.test_attention import CHUNKS, Case, after_contexts, cached, gradients, make_case, whole
from tests.triton.attention_checks import assert_accurate, assert_independent_of_packing, plain_attention

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = [5, 70, 33]


def _paged(
    case: Case, page: int, contexts: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Spans]:
    """The queries of `case` after `contexts` tokens, and a cache with the keys and values on scattered pages.

    The rest of the cache is NaN.
    """
    (_, kv_heads, D), lengths = case.k.shape, np.array(case.lengths)
    pages = -(-lengths // page)
    ids = np.random.default_rng(0).permutation(pages.sum() + 2).astype(np.int32)[: pages.sum()]
    shape = (int(pages.sum()) + 2, page, kv_heads, D)
    k, v = (torch.full(shape, float("nan"), dtype=case.q.dtype) for _ in range(2))
    tables, queries = np.zeros((len(lengths), pages.max()), np.int32), []
    by_sequence = np.split(ids, np.cumsum(pages)[:-1])
    for row, page_ids, rows, context in zip(tables, by_sequence, case.spans(), contexts, strict=True):
        row[: len(page_ids)] = page_ids
        for cache, packed in ((k, case.k), (v, case.v)):
            cache[torch.from_numpy(page_ids).long()] = 0
            for i, token in enumerate(packed[rows]):
                cache[page_ids[i // page], i % page] = token
        queries.append(case.q[rows][context:])
    starts = torch.tensor([0, *np.cumsum([len(q) for q in queries])], dtype=torch.int32)
    seqused_k = torch.tensor(lengths, dtype=torch.int32)
    return torch.cat(queries), k, v, Spans(starts, seqused_k, torch.from_numpy(tables), kv_heads)


def _vllm(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans, scale: float) -> torch.Tensor:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    o = torch.full_like(q, float("nan"))
    longest = int(spans.cu_seqlens_q.diff().max())
    unified_attention(
        q,
        k,
        v,
        o,
        spans.cu_seqlens_q,
        longest,
        spans.seqused_k,
        int(spans.seqused_k.max()),
        scale,
        True,
        (-1, -1),
        spans.block_table,
        0,
        None,
        None,
        None,
    )
    return o


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("group", "kv_heads", "page"), [(2, 2, 16), (1, 1, 32), (7, 1, 64), (8, 1, 16), (3, 3, 32)]
)
def test_bits_of_vllms_kernel_for_prefill_chunks_and_decode(batch_invariant, group, kv_heads, page, dtype):
    case = make_case([5, 45, 33], group, kv_heads, 48, dtype, seed=group)
    for contexts in ([0, 0, 0], [4, 25, 32], [4, 44, 32]):
        q, k, v, spans = _paged(case, page, contexts)
        ours = attention_paged(q, k, v, spans, case.scale)
        assert total_unequal([ours], [_vllm(q, k, v, spans, case.scale)]) == 0
        whole_sequences = zip(case.spans(), contexts, strict=True)
        after = torch.cat([whole(case)[rows][context:] for rows, context in whole_sequences])
        assert total_unequal([ours], [after]) == 0


def test_control_another_key_tile_gives_other_bits(batch_invariant, monkeypatch):
    case = make_case(LENGTHS, 2, 2, 48, torch.float32, seed=1)
    q, k, v, spans = _paged(case, 16, [0, 0, 0])
    monkeypatch.setattr(attention_triton, "KEY_TILE", KEY_TILE // 2)
    ours = attention_paged(q, k, v, spans, case.scale)
    assert total_unequal([ours], [_vllm(q, k, v, spans, case.scale)]) > 0


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(("group", "D"), [(2, 64), (7, 64), (4, 128)])
def test_prompts_in_pages_have_the_same_bits_by_programs_of_more_rows(group, D, dtype, monkeypatch):
    case = make_case([5, 80, 61], group, 1, D, dtype, seed=group)
    q, k, v, spans = _paged(case, KEY_TILE, [0, 11, 33])
    assert attention_triton._fills_many_rows(q, k, len(q) * group / 3, "hopper")
    results = []
    for many_rows in (True, False):
        monkeypatch.setattr(attention_triton, "_fills_many_rows", lambda *_, many=many_rows: many)
        results.append(attention_paged(q, k, v, spans, case.scale))
    assert total_unequal(results[:1], results[1:]) == 0


def test_control_another_row_sum_of_prompts_in_pages_gives_other_bits(monkeypatch):
    case = make_case([70, 33], 2, 1, 64, torch.float32, 1)  # 16 bits hide most of a last bit
    q, k, v, spans = _paged(case, KEY_TILE, [0, 0])
    written_out, results = attention_triton.row_sum, [attention_paged(q, k, v, spans, case.scale)]
    monkeypatch.setattr(attention_triton, "_fills_many_rows", lambda *_: True)
    results.append(attention_paged(q, k, v, spans, case.scale))

    class Reversed:
        """The columns in the order of a thread that holds 8 neighbours."""

        def __call__(self, p, rows):
            return written_out(p.reshape([rows, 8, 4]).permute([0, 2, 1]).reshape([rows, 32]), rows)

    monkeypatch.setattr(attention_triton, "row_sum", Reversed())
    results.append(attention_paged(q, k, v, spans, case.scale))
    assert [total_unequal([x], results[:1]) > 0 for x in results] == [False, False, True]


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_pages_in_a_narrower_dtype_are_converted_exactly(narrow):
    case = make_case(LENGTHS, 2, 1, 32, torch.float32, seed=3)
    q, k, v, spans = _paged(case, KEY_TILE, [0, 40, 32])
    stored = attention_paged(q, k.to(narrow), v.to(narrow), spans, case.scale)
    rounded = [x.to(narrow).float() for x in (k, v)]
    assert total_unequal([stored], [attention_paged(q, *rounded, spans, case.scale)]) == 0
    unrounded = attention_paged(q, k, v, spans, case.scale)
    assert total_unequal([stored], [unrounded]) > 0, "control: the rounding is there"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("chunk", "lengths"), [("one by one", [3, 35]), ("short", LENGTHS), ("long", LENGTHS)]
)
def test_prefill_chunks_and_decode_are_one_result(chunk, lengths, dtype):
    case = make_case(lengths, 2, 1, 32, dtype, seed=2)
    assert total_unequal([whole(case)], [cached(case, CHUNKS[chunk], 3)]) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_sequence_is_independent_of_what_it_is_packed_with(dtype):
    case = make_case(LENGTHS, 3, 1, 32, dtype, seed=4)
    assert_independent_of_packing(case, randn(5, *case.q.shape, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("contexts", [[0, 40, 32], [4, 69, 7]])
def test_queries_after_a_context_are_those_of_the_whole_sequence(contexts, dtype):
    case = make_case(LENGTHS, 3, 1, 32, dtype, seed=8)
    alone, rows_of_whole = after_contexts(case, contexts, randn(9, *case.q.shape, dtype=dtype))
    assert total_unequal(alone, rows_of_whole) == 0


def test_control_other_tiles_of_the_backward_give_other_bits(monkeypatch):
    case = make_case([90], 2, 1, 32, torch.float32, seed=6)
    dy = randn(7, *case.q.shape)
    before = gradients(case, dy)
    tiles = attention_bwd_triton._tiles(torch.float16, 64, "hopper")
    monkeypatch.setattr(attention_bwd_triton, "_tiles", lambda *_: tiles)
    for a, b in zip(before, gradients(case, dy), strict=True):
        assert total_unequal([a], [b]) > 0


def test_the_benchmarks_backward_with_atomics_computes_the_same():
    """The gradients of keys and values have equal bits. The gradient of the queries is only as accurate.

    The benchmark's backward sums it in another order. It must be as near to fp64 as plain torch.
    """
    from zerokl.benchmarks.atomic_attention import attention_bwd_atomic

    case = make_case([70, 40], 2, 1, 32, torch.float32, 10)
    spans = case.plan().on(case.q.device)
    o, lse = attention_triton.attention_packed(case.q, case.k, case.v, spans, case.scale, want_lse=True)
    inputs = (randn(15, *case.q.shape), case.q, case.k, case.v, o, lse, spans, case.scale)
    atomic, ours = attention_bwd_atomic(*inputs), attention_bwd_triton.attention_bwd(*inputs)
    assert total_unequal(atomic[1:], ours[1:]) == 0
    assert total_unequal(atomic[:1], ours[:1]) > 0
    plain, exact = (_plain_gradients(case, inputs[0], dtype)[0] for dtype in (torch.float32, torch.float64))
    assert_at_most_twice_the_error(atomic[0], plain, exact, "dq")


def _plain_gradients(case: Case, dy: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    leaves = [x.to(dtype).requires_grad_() for x in case[1:]]
    return torch.autograd.grad(plain_attention(case, leaves), leaves, dy.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy(dtype):
    assert_accurate(dtype, head_dim=32)
