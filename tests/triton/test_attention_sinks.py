"""Sinks on Triton, interpreted: one result in every form, the gradient too, beside fp64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.kernels import attention_sinks_triton, attention_triton
from zerokl.kernels.attention import varlen_plan
from zerokl.kernels.attention_rule import AttentionRule
from zerokl.kernels.attention_split_triton import no_chunks, split_paged
from zerokl.kernels.attention_tables import shared_chunks
from zerokl.kernels.attention_triton import attention_paged

from tests.helpers import assert_at_most_twice_the_error, property_settings, randn, total_unequal
from tests.kernels.test_attention import CHUNKS, Case, cached, make_case, whole
from tests.kernels.test_attention_sinks import NAMES, compared, results, rows_of, weight_of
from tests.triton.test_attention import _paged
from tests.triton.test_attention_windows import drawn_cases, dtypes

SMALL = ([70], 4, 2, 64), 3  # of `compared`: two tiles, and as many sinks and seeds as an error asks for
rules = st.builds(AttentionRule, chunk=st.sampled_from([0, 64]), window=st.sampled_from([0, 31, 64]))


@dtypes
@property_settings(3)
@given(drawn=drawn_cases, rule=rules)
def test_prefill_chunks_and_decode_are_one_result(dtype, drawn, rule):
    case = make_case(**drawn, dtype=dtype)
    sinks = rows_of(weight_of(case, drawn["seed"]), case)
    other = cached(case, CHUNKS["long"], drawn["seed"], rule, sinks)
    assert total_unequal([whole(case, rule, sinks)], [other]) == 0


@dtypes
@property_settings(3)
@given(drawn=drawn_cases, rule=rules)
def test_rows_and_their_gradients_know_their_sequence_only(dtype, drawn, rule):
    case = make_case(**drawn, dtype=dtype)
    w, dy = weight_of(case, drawn["seed"]), randn(drawn["seed"] + 9, *case.q.shape, dtype=dtype)
    *alone, dw = results(case.sequence(0), w, dy[case.spans()[0]], rule)
    *poisoned, _ = results(case.with_others_nan(0), w, dy, rule)
    assert total_unequal(alone, [x[case.spans()[0]] for x in poisoned]) == 0
    if len(case.lengths) > 1:
        *_, other = results(case.sequence(1), w, dy[case.spans()[1]], rule)
        assert total_unequal([dw + other], [results(case, w, dy, rule)[-1]]) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tma_and_pages_with_many_rows_have_the_bits_of_the_other_kernel(dtype, monkeypatch):
    case, rule = make_case([5, 70], 2, 1, 64, dtype, seed=5), AttentionRule(window=33)
    sinks, spans = rows_of(weight_of(case, 1), case), varlen_plan(case.lengths, 2, 1).on(case.q.device)
    results = [
        attention_triton.attention_packed(*case[1:], x, case.scale, True, rule, sinks)
        for x in (spans, spans._replace(query_tiles=None, key_tiles=None))
    ]
    assert total_unequal(*results) == 0
    q, k, v, spans = _paged(case, 32, [0, 0])
    for many in (True, False):
        monkeypatch.setattr(attention_triton, "_fills_many_rows", lambda *_, many=many: many)
        paged = attention_paged(q, k, v, spans, case.scale, rule, sinks)
        assert total_unequal([paged], [results[0][0]]) == 0


@dtypes
def test_one_chunk_split_chunks_and_shared_ones_end_with_one_sink(dtype):
    case, rule = make_case([190, 150, 40], 2, 1, 32, dtype, seed=3), AttentionRule(64)
    second = case.spans()[1].start
    tensors = [x.clone() for x in case[1:]]
    for x in tensors[1:]:
        x[second : second + 130] = x[:130]
    case = Case(case.lengths, *tensors)
    sinks = rows_of(weight_of(case, 1), case)
    expected = whole(case, rule, sinks)[[189, 339, 379]]
    q, k, v, spans = _paged(case, 32, [n - 1 for n in case.lengths])
    table = spans.block_table.clone()
    table[1, :4] = table[0, :4]
    shared = no_chunks(3, 2, 1, dtype, q.device)
    shared_chunks(table, torch.tensor(case.lengths), 2, 32, shared)
    assert (shared.items[:3, 2] > 0).any(), "control: two samples share chunks"
    for one in (spans, spans._replace(block_table=table, shared=shared)):
        o = split_paged(q, k, v, one, case.scale, rule, sinks[:3])
        assert total_unequal([o], [expected]) == 0
    last = spans._replace(block_table=spans.block_table[2:, :2], seqused_k=spans.seqused_k[2:])
    single = split_paged(q[2:], k, v, last, case.scale, rule, sinks[:1])
    assert total_unequal([single], [expected[2:]]) == 0


@dtypes
@pytest.mark.parametrize("rule", [AttentionRule(), AttentionRule(64, 50)])
def test_o_and_every_gradient_are_at_most_twice_as_far_from_fp64_as_plain_torch(dtype, rule):
    for name, *one in zip(NAMES, *compared(dtype, rule, *SMALL), strict=True):
        assert_at_most_twice_the_error(*one, name)


def test_control_sinks_left_out_and_a_gradient_of_the_other_sign_are_seen(monkeypatch):
    rule, right = AttentionRule(), attention_sinks_triton.sinks_bwd
    monkeypatch.setattr(attention_sinks_triton, "sinks_bwd", lambda *a: -right(*a))
    ours, torchs, exact = (one[-1] for one in compared(torch.bfloat16, rule, *SMALL))
    with pytest.raises(AssertionError, match="dsinks"):
        assert_at_most_twice_the_error(ours, torchs, exact, "dsinks")
    case = make_case([70], 2, 1, 64, torch.bfloat16, 1)
    sinks = rows_of(weight_of(case, 1), case)
    for chunk in (0, 64):
        rule = AttentionRule(chunk)
        assert total_unequal([whole(case, rule)], [whole(case, rule, sinks)]) > 1000
