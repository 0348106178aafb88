"""Attention through TMA, interpreted: a forward with the bits of the other kernel, a backward with the law.

The other kernel's bits are vLLM's (test_attention.py). The law is that a sequence does not depend on what it
is packed with, and that a prompt may be a context. Accuracy is judged against fp64.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.kernels import attention_bwd_tma_triton, attention_tma_triton, attention_triton
from zerokl.kernels.attention import varlen_plan
from zerokl.kernels.attention_tables import key_tile_table, query_tile_table

from tests.helpers import property_settings, randn, total_unequal
from tests.kernels.test_attention import Case, after_contexts, gradients, make_case
from tests.triton.attention_checks import assert_accurate, assert_independent_of_packing

DTYPES = (torch.bfloat16, torch.float16)


def _both(case: Case, contexts: list[int]) -> list[list[torch.Tensor]]:
    """o and lse of the queries after `contexts` tokens, by both kernels."""
    spans = zip(case.spans(), contexts, strict=True)
    rows = torch.cat([torch.arange(span.start + context, span.stop) for span, context in spans])
    queries = [n - context for n, context in zip(case.lengths, contexts, strict=True)]
    plan = varlen_plan(queries, case.q.shape[1], case.k.shape[1], contexts)
    q, spans = case.q[rows], plan.on(case.q.device)
    without_tables = spans._replace(query_tiles=None, key_tiles=None)
    return [
        list(attention_triton.attention_packed(q, case.k, case.v, s, case.scale, want_lse=True))
        for s in (spans, without_tables)
    ]


@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    group=st.sampled_from([1, 2, 4, 7, 8, 16]),
    kv_heads=st.integers(1, 2),
    D=st.sampled_from([64, 128]),
    seed=st.integers(0, 1000),
)
@property_settings(15)
def test_forward_has_the_bits_of_the_other_kernel(lengths, group, kv_heads, D, seed):
    case = make_case(lengths, group, kv_heads, D, DTYPES[seed % 2], seed)
    rng = np.random.default_rng(seed)
    contexts = [int(rng.integers(0, n)) for n in lengths] if seed % 3 else [0] * len(lengths)
    tma, other = _both(case, contexts)
    assert total_unequal(tma, other) == 0


def test_control_another_order_of_the_row_sum_gives_other_bits(monkeypatch):
    case = make_case([70, 33], 2, 1, 64, torch.bfloat16, 1)
    source = attention_tma_triton.row_sum

    class Reversed:
        """The columns in the order of a thread that holds 8 neighbours."""

        def __call__(self, p, rows):
            return source(p.reshape([rows, 8, 4]).permute([0, 2, 1]).reshape([rows, 32]), rows)

    monkeypatch.setattr(attention_tma_triton, "row_sum", Reversed())
    tma, other = _both(case, [0, 0])
    assert total_unequal(tma, other) > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [64, 128])
def test_sequence_is_independent_of_what_it_is_packed_with(D, dtype):
    case = make_case([5, 70, 33, 1], 3, 1, D, dtype, seed=4)
    assert_independent_of_packing(case, randn(5, *case.q.shape, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("contexts", [[0, 40, 32], [4, 69, 7], [3, 33, 1], [4, 64, 0]])
def test_queries_after_a_context_are_those_of_the_whole_sequence(contexts, dtype):
    case = make_case([5, 70, 33], 3, 1, 64, dtype, seed=8)
    alone, rows_of_whole = after_contexts(case, contexts, randn(9, *case.q.shape, dtype=dtype))
    assert total_unequal(alone, rows_of_whole) == 0


def test_control_steps_counted_from_the_first_query_give_other_bits():
    """Queries at other places of a step: what the step before the first query is for."""
    case = make_case([70], 2, 1, 64, torch.bfloat16, seed=8)
    alone, _ = after_contexts(case, [40], randn(9, *case.q.shape, dtype=torch.bfloat16))
    moved = Case([62], *(x[8:] for x in case[1:]))  # the same queries, 8 places further on
    shifted, _ = after_contexts(moved, [32], randn(9, *case.q.shape, dtype=torch.bfloat16)[8:])
    assert total_unequal([alone[2][40:]], [shifted[2][32:]]) > 0


def test_these_kernels_are_launched(monkeypatch):
    names = []
    for module in (attention_tma_triton, attention_bwd_tma_triton):
        launch = module.launch
        monkeypatch.setattr(
            module,
            "launch",
            lambda k, *a, launch=launch, **o: (names.append(k.fn.__name__), launch(k, *a, **o)),
        )
    case = make_case([40], 2, 1, 64, torch.bfloat16, seed=8)
    gradients(case, randn(9, *case.q.shape, dtype=torch.bfloat16))
    assert names == ["_forward_tma", "_backward_q_tma", "_backward_kv_tma"]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 200)), min_size=1, max_size=20),
    kv_heads=st.sampled_from([1, 8]),
)
@property_settings(50)
def test_tables_hold_every_query_and_every_key_once(lengths, kv_heads):
    queries, contexts = zip(*lengths, strict=True)
    starts, key_starts = (np.cumsum([0, *x]) for x in (queries, np.add(queries, contexts)))
    rows = []
    for token0, count, first, key_start in query_tile_table(queries, contexts, kv_heads, 9):
        s = int(np.searchsorted(starts, token0, side="right")) - 1
        assert (key_start, first - contexts[s]) == (key_starts[s], token0 - starts[s])
        assert 0 < count <= min(9, starts[s + 1] - token0)
        rows += range(token0, token0 + count)
    assert sorted(rows) == list(range(starts[-1]))
    keys = []
    for key0, count, first, start, n, context in key_tile_table(queries, contexts, 64):
        s = int(np.searchsorted(key_starts, key0, side="right")) - 1
        assert (start, n, context, first) == (starts[s], queries[s], contexts[s], key0 - key_starts[s])
        assert first % 64 == 0
        assert 0 < count <= min(64, key_starts[s + 1] - key0)
        keys += range(key0, key0 + count)
    assert sorted(keys) == list(range(key_starts[-1]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy(dtype):
    assert_accurate(dtype, head_dim=64)
