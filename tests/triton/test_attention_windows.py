"""Windows of keys and caps of scores on Triton, interpreted: one result in every form, beside fp64.

Windows of 1, 32 and 64 keys end at the edges of key tiles and pages; 31 and 33 lie beside them. Heads of 64
go through TMA in 16 bits, and heads of 32 do not.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.kernels import attention_triton
from zerokl.kernels.attention import varlen_plan
from zerokl.kernels.attention_rule import AttentionRule
from zerokl.kernels.attention_split_triton import no_chunks, split_paged
from zerokl.kernels.attention_tables import shared_chunks
from zerokl.kernels.attention_triton import attention_paged
from zerokl.kernels.softcap import softcap

from tests.helpers import assert_at_most_twice_the_error, property_settings, randn, total_unequal
from tests.kernels.test_attention import CHUNKS, Case, after_contexts, cached, gradients, make_case, whole
from tests.kernels.test_attention_windows import WINDOWS, plain
from tests.triton.test_attention import _paged

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
dtypes = pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.full), torch.bfloat16, torch.float16]
)
rules = st.builds(
    AttentionRule,
    chunk=st.sampled_from([0, 0, 64]),
    window=st.sampled_from([0, *WINDOWS]),
    cap=st.sampled_from([0.0, 2.0]),
).filter(lambda rule: rule.window or rule.cap)
drawn_cases = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(1, 100), min_size=1, max_size=2),
        "group": st.sampled_from([1, 2, 3]),
        "kv_heads": st.just(1),
        "D": st.sampled_from([32, 64]),
        "seed": st.integers(0, 99),
    }
)


@dtypes
@property_settings(5)
@given(drawn=drawn_cases, rule=rules)
def test_prefill_chunks_and_decode_are_one_result(dtype, drawn, rule):
    case = make_case(**drawn, dtype=dtype)
    for chunk in ("short", "long"):
        assert total_unequal([whole(case, rule)], [cached(case, CHUNKS[chunk], drawn["seed"], rule)]) == 0


@dtypes
@property_settings(5)
@given(drawn=drawn_cases, rule=rules, part=st.floats(0, 0.99))
def test_rows_know_their_sequence_only_and_have_the_gradients_of_the_whole(dtype, drawn, rule, part):
    case = make_case(**drawn, dtype=dtype)
    dy = randn(drawn["seed"] + 9, *case.q.shape, dtype=dtype)
    alone, rows = case.sequence(0), case.spans()[0]
    poisoned = case.with_others_nan(0)
    assert total_unequal([whole(alone, rule)], [whole(poisoned, rule)[rows]]) == 0
    expected = gradients(alone, dy[rows], rule)
    assert total_unequal(expected, [g[rows] for g in gradients(poisoned, dy, rule)]) == 0
    assert total_unequal(*after_contexts(case, [int(n * part) for n in case.lengths], dy, rule)) == 0


@pytest.mark.parametrize(
    "window", [x if x in (33, 64) else pytest.param(x, marks=pytest.mark.full) for x in WINDOWS]
)
@pytest.mark.parametrize(
    ("dtype", "chunk"),
    [
        (torch.bfloat16, 0),
        pytest.param(torch.float32, 0, marks=pytest.mark.full),
        pytest.param(torch.bfloat16, 64, marks=pytest.mark.full),
    ],
)
def test_a_row_has_the_bits_of_a_walk_over_the_keys_of_its_window(window, dtype, chunk):
    """From the edge of the tile where it begins; hidden keys before it are far away."""
    case, rule = make_case([150], 2, 1, 64, dtype, seed=window), AttentionRule(chunk, window)
    case = Case(case.lengths, case.q.abs(), case.k, case.v)
    o = whole(case, rule)
    for i in (0, 31, 32, 63, 64, 100, 149):
        begin = max(0, i - window + 1)
        rows = slice(begin // 64 * 64, i + 1)
        q, k, v = (x[rows].clone() for x in case[1:])
        k[: begin % 64] = -1e30
        alone = whole(Case([len(k)], q, k, v), AttentionRule(chunk))[-1]
        assert total_unequal([o[i]], [alone]) == 0
    off_by_one = whole(case, rule._replace(window=window + 1))
    assert window >= 150 or total_unequal([o], [off_by_one]) > 1000, "control"


@pytest.mark.parametrize("chunk", [0, 64])
def test_the_tiles_before_a_window_are_not_read(chunk):
    """Pages of NaN there change nothing."""
    case, rule = make_case([150, 90], 2, 1, 64, torch.bfloat16, seed=1), AttentionRule(chunk, 40)
    q, k, v, spans = _paged(case, 32, [149, 89])
    attend = attention_paged if not chunk else split_paged
    o = attend(q, k, v, spans, case.scale, rule)
    before = {0: [3, 1], 64: [2, 0]}[chunk]  # whole tiles of 32, or of 64, before keys 110 and 50
    for row, n in zip(spans.block_table.long(), before, strict=True):
        k[row[:n]], v[row[:n]] = float("nan"), float("nan")
    assert total_unequal([attend(q, k, v, spans, case.scale, rule)], [o]) == 0
    k[spans.block_table[:, -1].long()] = float("nan")
    after = attend(q, k, v, spans, case.scale, rule)
    assert after[0].isnan().all(), "control: the last tile is read"


@dtypes
def test_chunks_that_samples_share_have_the_same_bits_under_a_window(dtype):
    case, rule = make_case([190, 150, 70], 2, 1, 32, dtype, seed=3), AttentionRule(64, 50, 2.0)
    tensors = [x.clone() for x in case[1:]]
    second = case.spans()[1].start
    for x in tensors[1:]:
        x[second : second + 130] = x[:130]
    case = Case(case.lengths, *tensors)
    q, k, v, spans = _paged(case, 32, [n - 1 for n in case.lengths])
    expected = whole(case, rule)[[189, 339, 409]]
    assert total_unequal([split_paged(q, k, v, spans, case.scale, rule)], [expected]) == 0
    table = spans.block_table.clone()
    table[1, :4] = table[0, :4]
    shared = no_chunks(3, 2, 1, dtype, q.device)
    shared_chunks(table, torch.tensor(case.lengths), 2, 32, shared)
    assert (shared.items[:3, 2] > 0).any(), "control: two samples share chunks"
    spans = spans._replace(block_table=table, shared=shared)
    assert total_unequal([split_paged(q, k, v, spans, case.scale, rule)], [expected]) == 0


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("rule", [AttentionRule(window=33), AttentionRule(0, 40, 2.0)])
def test_tma_and_pages_with_many_rows_have_the_bits_of_the_other_kernel(dtype, rule, monkeypatch):
    case = make_case([5, 150], 2, 1, 64, dtype, seed=5)
    spans = varlen_plan(case.lengths, 2, 1).on(case.q.device)
    results = [
        attention_triton.attention_packed(*case[1:], x, case.scale, True, rule)
        for x in (spans, spans._replace(query_tiles=None, key_tiles=None))
    ]
    assert total_unequal(*results) == 0
    q, k, v, spans = _paged(case, 32, [0, 0])
    for many in (True, False):
        monkeypatch.setattr(attention_triton, "_fills_many_rows", lambda *_, many=many: many)
        paged = attention_paged(q, k, v, spans, case.scale, rule)
        assert total_unequal([paged], [results[0][0]]) == 0


@dtypes
@pytest.mark.parametrize("rule", [AttentionRule(0, 50, 5.0), AttentionRule(64, 33, 2.0)])
def test_accuracy_and_control_a_window_one_off_and_a_cap_left_out_are_seen(dtype, rule):
    """o, dq, dk and dv are at most twice as far from fp64 as plain torch in this dtype is."""
    case = make_case([90], 2, 1, 64, dtype, 10)
    dy = randn(15, *case.q.shape, dtype=dtype)
    ours, *wrong = (
        [whole(case, x), *gradients(case, dy, x)]
        for x in (rule, rule._replace(window=rule.window + 1), rule._replace(cap=0.0))
    )
    torchs, exact = (plain(case, rule, dy, x) for x in (dtype, torch.float64))
    for n, name in enumerate(("o", "dq", "dk", "dv")):
        assert_at_most_twice_the_error(ours[n], torchs[n], exact[n], name)
        for other in wrong:
            with pytest.raises(AssertionError, match=name):
                assert_at_most_twice_the_error(other[n], torchs[n], exact[n], name)


def test_control_a_cap_after_the_mask_would_be_seen():
    """A cap of -inf is -cap, so hidden keys would have a weight."""
    case, rule = make_case([90], 1, 1, 32, torch.float32, 10), AttentionRule(cap=2.0)
    right, late = (
        _capped_weights(case, rule.cap, after_mask) @ case.v[:, 0].double() for after_mask in (False, True)
    )
    o = whole(case, rule)[:, 0].double()
    assert (o - right).abs().max() < 1e-5 < 1e-2 < (o - late).abs().max()


def _capped_weights(case: Case, cap: float, after_mask: bool) -> torch.Tensor:
    """The weights of each row's keys in fp64, for one head. [T, T]"""
    s = case.q[:, 0].double() @ case.k[:, 0].double().T * case.scale
    hidden = torch.ones_like(s, dtype=torch.bool).triu(1)
    if not after_mask:
        return torch.softmax((torch.tanh(s / cap) * cap).masked_fill(hidden, -torch.inf), -1)
    return torch.softmax(torch.tanh(s.masked_fill(hidden, -torch.inf) / cap) * cap, -1)


@dtypes
def test_the_cap_of_logits_is_accurate_and_has_one_result_wherever_a_number_lies(dtype):
    x = torch.cat([randn(0, 3000, scale=20.0), torch.linspace(-90, 90, 2001), torch.tensor([0.0, -0.0])])
    x = x.to(dtype)
    y = softcap(x, 30.0)
    exact = torch.tanh(x.double() / 30.0) * 30.0
    plain = (torch.tanh(x.float() / 30.0) * 30.0).to(dtype)
    assert_at_most_twice_the_error(y, plain, exact, "softcap")
    for a, b in ((1, 1000), (3, 10), (500, 4777)):
        assert total_unequal([softcap(x[a:b], 30.0)], [y[a:b]]) == 0
    assert (y.abs() <= 30.0).all()
