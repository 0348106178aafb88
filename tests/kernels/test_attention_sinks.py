"""Attention with sinks: one result in every form, the gradient of the sinks too, beside fp64."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.kernels import attention as attention_module
from zerokl.kernels import attention_ref
from zerokl.kernels.attention import attention, varlen_plan
from zerokl.kernels.attention_rule import AttentionRule
from zerokl.kernels.attention_sinks import sink_rows
from zerokl.kernels.grad import GradBuffer, accumulate_dtype
from zerokl.kernels.order import token_blocks
from zerokl.kernels.passes import Pass

from tests.helpers import assert_at_most_twice_the_error, property_settings, randn, total_unequal
from tests.kernels.test_attention import CHUNKS, Case, cached, cases, dtypes, make_case, whole
from tests.kernels.test_cpp import dtypes as cpp_dtypes
from tests.kernels.test_cpp import unequal, with_gradients

rules = st.builds(
    AttentionRule,
    chunk=st.sampled_from([0, 0, 32, 64]),
    window=st.sampled_from([0, 0, 31, 64, 1000]),
    cap=st.just(0.0),
)
NAMES = "o", "dq", "dk", "dv", "dsinks"


def weight_of(case: Case, seed: int) -> torch.Tensor:
    """Sinks of the heads, about as large as the scores."""
    return randn(seed, case.q.shape[1], dtype=case.q.dtype, scale=3.0)


def rows_of(w: torch.Tensor, case: Case) -> torch.Tensor:
    return w.to(accumulate_dtype(w.dtype)).expand(len(case.q), -1)


def results(case: Case, w: torch.Tensor, dy: torch.Tensor, rule: AttentionRule) -> list[torch.Tensor]:
    """o, dq, dk, dv, and the gradient of the sinks as its buffer has it, in fp32."""
    leaves = [x.detach().clone().requires_grad_() for x in (*case[1:], w)]
    buffer = GradBuffer.like(w)
    in_pass = Pass(token_blocks(case.lengths), {leaves[3]: buffer})
    o = attention(*leaves[:3], case.plan(), case.scale, rule, sink_rows(leaves[3], len(case.q), in_pass))
    o.backward(dy)
    assert leaves[3].grad is None, "a gradient that missed its buffer"
    return [o.detach(), *(x.grad for x in leaves[:3]), buffer.zeroed([0])[0]]


@dtypes
@pytest.mark.parametrize("chunk", CHUNKS)
@property_settings(6)
@given(drawn=cases, rule=rules)
def test_prefill_chunks_and_decode_are_one_result(dtype, chunk, drawn, rule):
    case = make_case(**drawn, dtype=dtype)
    sinks = rows_of(weight_of(case, drawn["seed"]), case)
    other = cached(case, CHUNKS[chunk], drawn["seed"], rule, sinks)
    assert total_unequal([whole(case, rule, sinks)], [other]) == 0


@dtypes
@property_settings(6)
@given(drawn=cases, rule=rules)
def test_rows_know_their_sequence_only(dtype, drawn, rule):
    """And the gradient of the sinks is a sum over the sequences, in their order."""
    case = make_case(**drawn, dtype=dtype)
    w, dy = weight_of(case, drawn["seed"]), randn(drawn["seed"] + 9, *case.q.shape, dtype=dtype)
    *together, dw = results(case, w, dy, rule)
    added = torch.zeros_like(dw)
    for s, rows in enumerate(case.spans()):
        *alone, dw_alone = results(case.sequence(s), w, dy[rows], rule)
        assert total_unequal(alone, [x[rows] for x in together]) == 0
        if case.lengths[s] <= 128:  # of one token block
            added += dw_alone
    if max(case.lengths) <= 128:
        assert total_unequal([dw], [added]) == 0


@cpp_dtypes
@property_settings(10)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    rule=rules,
    D=st.sampled_from([16, 64]),
)
def test_the_loops_in_cpp_have_the_bits_of_the_reference(dtype, lengths, rule, D):
    case = make_case(lengths, 2, 2, D, dtype, seed=len(lengths))
    sinks = rows_of(weight_of(case, 5), case).clone()
    attend = lambda q, k, v, z: attention(q, k, v, case.plan(), case.scale, rule, z)  # noqa: E731
    assert unequal(lambda: with_gradients(attend, *case[1:], sinks), case.q) == 0


def plain(
    case: Case, w: torch.Tensor, dy: torch.Tensor, window: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """The results of plain torch for one sequence, as the eager attention of gpt-oss has them."""
    q, k, v, z = leaves = [x.detach().to(dtype).requires_grad_() for x in (*case[1:], w)]
    group, T = q.shape[1] // k.shape[1], len(q)
    kr, vr = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    s = q.transpose(0, 1) @ kr.transpose(1, 2) * case.scale
    i, j = torch.arange(T).unsqueeze(1), torch.arange(T)
    s = s.masked_fill((j > i) | (j <= i - (window or T)), -torch.inf)
    s = torch.cat([s, z.view(-1, 1, 1).expand(-1, T, 1)], -1)
    p = torch.softmax(s - s.amax(-1, keepdim=True), -1)[..., :-1]
    o = (p @ vr).transpose(0, 1)
    return [o.detach(), *torch.autograd.grad(o, leaves, dy.to(dtype))]


def compared(
    dtype: torch.dtype, rule: AttentionRule, shape: tuple = ([150], 4, 4, 32), seeds: int = 6
) -> list[list[torch.Tensor]]:
    """Ours, those of plain torch, and those of fp64, of several seeds: of each name one stack.

    shape: see make_case.
    """
    runs: list[list[list[torch.Tensor]]] = [[], [], []]
    for seed in range(10, 10 + 10 * seeds, 10):
        case = make_case(*shape, dtype, seed)
        w, dy = weight_of(case, seed), randn(seed + 5, *case.q.shape, dtype=dtype)
        runs[0].append(results(case, w, dy, rule))
        runs[1].append(plain(case, w, dy, rule.window, dtype))
        runs[2].append(plain(case, w, dy, rule.window, torch.float64))
    return [[torch.stack(x) for x in zip(*who, strict=True)] for who in runs]


@dtypes
@pytest.mark.parametrize("rule", [AttentionRule(), AttentionRule(32, 50)])
def test_o_and_every_gradient_are_at_most_twice_as_far_from_fp64_as_plain_torch(dtype, rule):
    for name, *one in zip(NAMES, *compared(dtype, rule), strict=True):
        assert_at_most_twice_the_error(*one, name)


def out_of_the_denominator(m, sinks):
    high, a, b = JOIN(m, sinks)
    return high, a, torch.zeros_like(b)


def as_a_constant(do, o, lse, sinks):
    return torch.zeros_like(lse)


def without_the_other_sign(do, o, lse, sinks):
    return -SINKS_BWD(do, o, lse, sinks)


JOIN, SINKS_BWD = attention_ref.join_sink, attention_module.sinks_bwd
FAULTS: dict[str, tuple[object, str, Callable]] = {
    "a sink left out of the denominator": (attention_ref, "join_sink", out_of_the_denominator),
    "no gradient of the sinks": (attention_module, "sinks_bwd", as_a_constant),
    "a gradient of the other sign": (attention_module, "sinks_bwd", without_the_other_sign),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_control_a_planted_fault_is_seen(fault, monkeypatch):
    monkeypatch.setattr(attention_module, "on_cpp", lambda x: False)
    monkeypatch.setattr(*FAULTS[fault])
    wrong = []
    for name, *one in zip(NAMES, *compared(torch.float32, AttentionRule()), strict=True):
        try:
            assert_at_most_twice_the_error(*one, name)
        except AssertionError:
            wrong.append(name)
    assert wrong == (list(NAMES) if "denominator" in fault else ["dsinks"])


@pytest.mark.parametrize("rule", [AttentionRule(), AttentionRule(32, 2)])
def test_gradcheck_in_fp64(rule):
    case = make_case([4], 2, 1, 16, torch.float64, seed=4)
    leaves = [x.requires_grad_() for x in (*case[1:], weight_of(case, 6))]

    def attend(q, k, v, w):
        return attention(q, k, v, case.plan(), case.scale, rule, sink_rows(w, len(q)))

    assert torch.autograd.gradcheck(attend, leaves)


def test_sinks_of_another_shape_or_dtype_are_refused_by_name():
    case = make_case([4], 2, 1, 16, torch.bfloat16, seed=4)
    plan = varlen_plan([4], 2, 1)
    for sinks in (torch.zeros(3, 2), torch.zeros(4, 2, dtype=torch.bfloat16)):
        with pytest.raises(
            ValueError, match=r"attention: sinks .* must be \(4, 2\), one of each row and head"
        ):
            attention(*case[1:], plan, 0.25, sinks=sinks)
    with pytest.raises(ValueError, match=r"sink_rows: w \(1, 2\) must be \[heads\]"):
        sink_rows(torch.zeros(1, 2), 4)
