"""Attention in chunks, to a window, and with a cap of the scores: one result in every form, beside fp64.

Windows of 1, 32 and 64 keys end at the edges of key tiles and pages; 31 and 33 lie beside them.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.kernels.attention import attention
from zerokl.kernels.attention_plan import AttentionPlan
from zerokl.kernels.attention_rule import AttentionRule

from tests.helpers import assert_at_most_twice_the_error, property_settings, randn, total_unequal
from tests.kernels.test_attention import (
    CHUNKS,
    Case,
    after_contexts,
    cached,
    cases,
    dtypes,
    gradients,
    make_case,
    whole,
)
from tests.kernels.test_cpp import dtypes as cpp_dtypes
from tests.kernels.test_cpp import unequal, with_gradients

WINDOWS = (1, 2, 31, 32, 33, 64, 65, 1000)
rules = st.builds(
    AttentionRule,
    chunk=st.sampled_from([0, 0, 32, 64, 128]),
    window=st.sampled_from([0, *WINDOWS]),
    cap=st.sampled_from([0.0, 2.0]),
).filter(any)


@dtypes
@pytest.mark.parametrize("chunk", CHUNKS)
@property_settings(8)
@given(drawn=cases, rule=rules)
def test_prefill_chunks_and_decode_are_one_result(dtype, chunk, drawn, rule):
    case = make_case(**drawn, dtype=dtype)
    assert total_unequal([whole(case, rule)], [cached(case, CHUNKS[chunk], drawn["seed"], rule)]) == 0


@dtypes
@property_settings(8)
@given(drawn=cases, rule=rules, pick=st.integers(0, 3), part=st.floats(0, 0.99))
def test_rows_know_their_sequence_only_and_have_the_gradients_of_the_whole(dtype, drawn, rule, pick, part):
    case = make_case(**drawn, dtype=dtype)
    dy, s = randn(drawn["seed"] + 9, *case.q.shape, dtype=dtype), pick % len(case.lengths)
    rows, alone, poisoned = case.spans()[s], case.sequence(s), case.with_others_nan(s)
    assert total_unequal([whole(alone, rule)] * 2, [whole(x, rule)[rows] for x in (case, poisoned)]) == 0
    expected = gradients(alone, dy[rows], rule)
    for x in (case, poisoned):
        assert total_unequal(expected, [g[rows] for g in gradients(x, dy, rule)]) == 0
    assert total_unequal(*after_contexts(case, [int(n * part) for n in case.lengths], dy, rule)) == 0


@cpp_dtypes
@property_settings(10)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    rule=rules,
    D=st.sampled_from([16, 64, 256]),
)
def test_the_loops_in_cpp_have_the_bits_of_the_reference(dtype, lengths, rule, D):
    case = make_case(lengths, 2, 2, D, dtype, seed=len(lengths))
    attend = lambda q, k, v: attention(q, k, v, case.plan(), case.scale, rule)  # noqa: E731
    assert unequal(lambda: with_gradients(attend, *case[1:]), case.q) == 0


@pytest.mark.parametrize("window", WINDOWS)
def test_a_row_has_the_bits_of_a_walk_from_the_edge_of_the_tile_where_its_window_begins(window):
    """So whether the tiles before are read decides no bit. The keys between edge and window are far away."""
    case, rule = make_case([150], 2, 1, 32, torch.float32, seed=window), AttentionRule(window=window)
    case = Case(case.lengths, case.q.abs(), case.k, case.v)
    o = whole(case, rule)
    for i in (0, 31, 32, 63, 64, 100, 149):
        begin = max(0, i - window + 1)
        rows = slice(begin // 32 * 32, i + 1)
        q, k, v = (x[rows].clone() for x in case[1:])
        k[: begin % 32] = -1e30
        assert total_unequal([o[i]], [whole(Case([len(k)], q, k, v))[-1]]) == 0
    walked = whole(case)
    assert total_unequal([o[:window]], [walked[:window]]) == 0
    assert window >= 150 or total_unequal([o[window:]], [walked[window:]]) > 1000, "control: they see less"


def plain(case: Case, rule: AttentionRule, dy: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """o, dq, dk, dv of plain torch for one sequence, as the eager attention of transformers has them."""
    q, k, v = leaves = [x.detach().to(dtype).requires_grad_() for x in case[1:]]
    group, T = q.shape[1] // k.shape[1], len(q)
    kr, vr = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    s = q.transpose(0, 1) @ kr.transpose(1, 2) * case.scale
    if rule.cap:
        s = torch.tanh(s / rule.cap) * rule.cap
    i, j = torch.arange(T).unsqueeze(1), torch.arange(T)
    hidden = (j > i) | (j <= i - (rule.window or T))
    p = torch.softmax(
        s.masked_fill(hidden, -torch.inf), -1, dtype=None if dtype.itemsize > 2 else torch.float32
    )
    o = (p.to(dtype) @ vr).transpose(0, 1)
    return [o.detach(), *torch.autograd.grad(o, leaves, dy.to(dtype))]


@dtypes
@pytest.mark.parametrize(
    "rule", [AttentionRule(window=33), AttentionRule(cap=2.0), AttentionRule(0, 50, 5.0)]
)
def test_accuracy_and_control_a_window_one_off_and_a_cap_left_out_are_seen(dtype, rule):
    """o, dq, dk and dv are at most twice as far from fp64 as plain torch in this dtype is."""
    results: list[list[list[torch.Tensor]]] = [[], [], []]
    for seed in (10, 20, 30):
        case = make_case([150], 2, 1, 64, dtype, seed)
        dy = randn(seed + 5, *case.q.shape, dtype=dtype)
        results[0].append([whole(case, rule), *gradients(case, dy, rule)])
        results[1].append(plain(case, rule, dy, dtype))
        results[2].append(plain(case, rule, dy, torch.float64))
    wrong = [rule._replace(window=rule.window + 1)] if rule.window else []
    wrong += [rule._replace(cap=0.0)] if rule.cap else []
    for n, name in enumerate(("o", "dq", "dk", "dv")):
        ours, torchs, exact = (torch.stack([run[n] for run in runs]) for runs in results)
        assert_at_most_twice_the_error(ours, torchs, exact, name)
        for other in wrong:
            off = [whole(case, other), *gradients(case, dy, other)][n]
            with pytest.raises(AssertionError, match=name):
                assert_at_most_twice_the_error(off, torchs[-1], exact[-1], name)


@pytest.mark.parametrize("rule", [AttentionRule(window=3), AttentionRule(cap=1.0), AttentionRule(32, 2, 3.0)])
def test_gradcheck_in_fp64(rule):
    case = make_case([4], 1, 1, 16, torch.float64, seed=4)
    leaves = [x.requires_grad_() for x in case[1:]]
    assert torch.autograd.gradcheck(lambda *x: attention(*x, case.plan(), case.scale, rule), leaves)


def test_tanh_has_the_same_bits_wherever_a_number_lies():
    x = randn(0, 1000, scale=3.0)
    expected = x.tanh()
    for a, b in ((1, 1000), (3, 10), (7, 8), (500, 777)):
        assert total_unequal([x[a:b].tanh()], [expected[a:b]]) == 0


@pytest.mark.parametrize(("window", "tiles"), [(0, 7), (42, 3), (1, 1)])
def test_the_tiles_before_a_window_are_not_gathered(window, tiles):
    plan = AttentionPlan([1], [199], np.arange(7)[None], 2, 1)
    assert [len(g.tiles) for g in plan.index(32, torch.float32, AttentionRule(window=window)).groups] == [
        tiles
    ]
