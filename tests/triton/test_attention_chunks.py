"""Attention over chunks of keys on Triton, interpreted: every form has the bits of rows that are taken alone.

The reference takes a row, and only the tiles that it sees, in numpy's fp32, with the interpreter's products.
Chunks are short here, so that rows have several.
"""

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from zerokl.kernels import attention_chunks_triton, attention_split_triton, chunk_state_triton
from zerokl.kernels.attention_chunks_triton import walk_packed, walk_paged
from zerokl.kernels.attention_rule import AttentionRule
from zerokl.kernels.attention_split_triton import no_chunks, split_paged
from zerokl.kernels.attention_tables import SharedChunks, shared_chunks
from zerokl.kernels.chunk_state_triton import LOG2E, tile_keys
from zerokl.kernels.launch import next_power_of_2

from tests.helpers import property_settings, randn, total_unequal
from tests.kernels.test_attention import CHUNKS, Case, after_contexts, cached, make_case, whole
from tests.triton.attention_checks import assert_accurate
from tests.triton.interpreter import product
from tests.triton.test_attention import _paged

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
F32, LOW = np.float32, np.float32(-np.inf)
RULE = AttentionRule(64)


def fma(x, y, z):
    """x y + z, rounded once to fp32: the sum in fp64 is rounded to odd before it is rounded to fp32."""
    with np.errstate(invalid="ignore"):
        xy = np.multiply(x, y, dtype=np.float64)
        z = np.broadcast_to(np.asarray(z, np.float64), np.shape(xy + z))
        total = np.asarray(xy + z)
        back = total - xy
        error = (xy - (total - back)) + (z - back)
        is_even = (total.view(np.int64) & 1) == 0
        toward = np.where(error > 0, np.inf, -np.inf)
        inexact = (error != 0) & np.isfinite(total)
        total = np.where(inexact & is_even, np.nextafter(total, toward), total)
    return total.astype(F32)


def row_sum(p: np.ndarray) -> np.float32:
    p = p.reshape(-1, 4, 2)
    p = p[..., 0] + p[..., 1]
    while len(p) > 1:
        p = p[0::2] + p[1::2]
    p = p[0, 0::2] + p[0, 1::2]
    return p[0] + p[1]


def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(x)).to(dtype).float().numpy()


def row(q, k, v, scale2, chunk, dtype) -> tuple[np.ndarray, np.float32]:
    """o before it is rounded, and lse, of one row: q [1, D], k and v [n, D] that it sees, all in fp32."""
    n, tile, width = len(k), tile_keys(dtype), q.shape[1]
    D = next_power_of_2(width)  # as the kernels multiply
    q, k, v = (np.pad(x, ((0, 0), (0, D - width))) for x in (q, k, v))
    M, L, A = LOW, F32(0), np.zeros((1, D), F32)
    for first in range(0, n, chunk):
        m, l, acc = LOW, F32(0), np.zeros((1, D), F32)
        for j in range(first, min(first + chunk, n), tile):
            seen = min(tile, n - j, first + chunk - j)
            keys, values, s = (np.zeros(x, F32) for x in ((tile, D), (tile, D), (1, tile)))
            keys[:seen], values[:seen] = k[j : j + seen], v[j : j + seen]
            s = product(q, keys.T)
            s[:, seen:] = LOW
            high = max(m, s.max() * scale2)
            p, a = np.exp2(fma(s, scale2, -high)), np.exp2(m - high)
            l = fma(l, a, row_sum(p[0]))
            acc, m = product(rounded(p, dtype), values) + acc * a, high
        high = max(M, m)
        a, b = np.exp2(M - high), np.exp2(m - high)
        L, A, M = fma(l, b, L * a), fma(acc, b, A * a), high
    return A[0, :width] / L + F32(0), (M + np.log2(L)) * F32(np.log(2.0))


def by_rows(case: Case, chunk: int = RULE.chunk) -> list[torch.Tensor]:
    """o [T, Hq, D] and lse [T, Hq] of whole sequences."""
    dtype, group = case.q.dtype, case.q.shape[1] // case.k.shape[1]
    o, lse = torch.empty_like(case.q), torch.empty(case.q.shape[:2])
    q, k, v = (x.float().numpy() for x in case[1:])
    for span in case.spans():
        for i in range(span.start, span.stop):
            for h in range(q.shape[1]):
                keys = slice(span.start, i + 1), h // group
                alone, log = row(q[i, h][None], k[keys], v[keys], F32(case.scale * LOG2E), chunk, dtype)
                o[i, h], lse[i, h] = torch.from_numpy(alone).to(dtype), float(log)
    return [o, lse]


def packed(case: Case, rule: AttentionRule = RULE) -> list[torch.Tensor]:
    plan, longest = case.plan(), max(case.lengths)
    return list(walk_packed(*case[1:], plan.on(case.q.device), case.scale, rule, True, longest))


def decoded(case: Case, page: int, rule: AttentionRule = RULE, **fields) -> tuple[torch.Tensor, torch.Tensor]:
    """o of the last token of each sequence by split and merge, and by the walk over the same pages."""
    q, k, v, spans = _paged(case, page, [n - 1 for n in case.lengths])
    spans = spans._replace(**fields)
    return split_paged(q, k, v, spans, case.scale, rule), walk_paged(q, k, v, spans, case.scale, rule)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "D"), [(2, 64), (3, 16), (1, 48)])
def test_all_forms_have_the_bits_of_rows_alone(group, D, dtype):
    case = make_case([5, 64, 130], group, 1, D, dtype, seed=group)
    expected = by_rows(case)
    assert total_unequal(packed(case), expected) == 0
    last = [span.stop - 1 for span in case.spans()]
    for page in (32, 64):
        split, walked = decoded(case, page)
        assert total_unequal([split, walked], [expected[0][last]] * 2) == 0
    contexts = [4, 0, 70]
    q, k, v, spans = _paged(case, 16, contexts)
    rows = torch.cat([torch.arange(s.start + c, s.stop) for s, c in zip(case.spans(), contexts, strict=True)])
    assert total_unequal([walk_paged(q, k, v, spans, case.scale, RULE)], [expected[0][rows]]) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_chunks_and_decode_are_one_result(dtype):
    case = make_case([3, 70], 2, 1, 32, dtype, seed=2)
    o = whole(case, RULE)
    assert total_unequal([o], [cached(case, CHUNKS["short"], 3, RULE)]) == 0
    assert total_unequal([o], [packed(case)[0]]) == 0
    alone, rows_of_whole = after_contexts(case, [1, 66], randn(9, *case.q.shape, dtype=dtype), RULE)
    assert total_unequal(alone, rows_of_whole) == 0


@given(
    lengths=st.lists(st.integers(1, 230), min_size=2, max_size=6),
    shared_pages=st.integers(0, 7),
    page=st.sampled_from([32, 64]),
    slots_=st.integers(1, 3),
)
@property_settings(40)
def test_every_chunk_of_every_token_is_in_one_item(lengths, shared_pages, page, slots_):
    chunk_pages, ids = 128 // page, iter(range(1000))
    prefix = [next(ids) for _ in range(shared_pages)]
    pages = []
    for n in lengths:
        count = -(-n // page)
        common = prefix[: min(count, n // page)]
        pages.append([*common, *(next(ids) for _ in range(count - len(common)))])
    n, columns = len(lengths), max(map(len, pages))
    table = torch.tensor([[*ids, *[0] * (columns - len(ids))] for ids in pages], dtype=torch.int32)
    out = SharedChunks(*(torch.full((2 * n, width), 77, dtype=torch.int32) for width in (3, slots_)))
    shared_chunks(table, torch.tensor(lengths), chunk_pages, page, out)
    items, tokens = out
    work = []
    for (row_of_table, first, end), members in zip(items.tolist(), tokens.tolist(), strict=True):
        for token in filter(lambda x: x >= 0, members):
            chunks = range(first, min(end, -(-lengths[token] // 128)))
            work += [(token, c) for c in chunks]
            for c in chunks:
                read = slice(c * chunk_pages, (c + 1) * chunk_pages)
                assert pages[row_of_table][read][: len(pages[token][read])] == pages[token][read]
    assert sorted(work) == [(i, c) for i, n in enumerate(lengths) for c in range(-(-n // 128))]


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_that_samples_share_are_computed_once_with_the_same_bits(dtype):
    case = make_case([150, 170, 140, 70], 2, 1, 32, dtype, seed=3)
    prefix = 130  # two chunks of 64, and a part of the third
    tensors = [x.clone() for x in case[1:]]
    for x in tensors[1:]:
        for span in case.spans()[1:3]:
            x[span.start : span.start + prefix] = x[:prefix]
    case = Case(case.lengths, *tensors)
    expected, _ = decoded(case, 32)
    q, k, v, spans = _paged(case, 32, [n - 1 for n in case.lengths])
    table = spans.block_table.clone()
    table[1:3, :4] = table[0, :4]  # pages that hold 128 keys
    shared = no_chunks(4, 2, 1, dtype, q.device)
    shared_chunks(table, torch.tensor(case.lengths), 2, 32, shared)
    assert shared.items[0].tolist() == [0, 0, 2]
    spans = spans._replace(block_table=table, shared=shared)
    assert total_unequal([split_paged(q, k, v, spans, case.scale, RULE)], [expected]) == 0
    k[table[0, 0].item()] += 1  # control: all three read it
    o = split_paged(q, k, v, spans, case.scale, RULE)
    assert [total_unequal([o[i]], [expected[i]]) > 0 for i in range(4)] == [True, True, True, False]


@pytest.mark.full
def test_control_another_chunk_or_tile_has_other_bits(monkeypatch):
    case = make_case([150, 140], 2, 1, 32, torch.float32, seed=4)
    o, _ = packed(case)
    other, _ = packed(case, AttentionRule(128))
    assert total_unequal([o[:64]], [other[:64]]) == 0
    assert total_unequal([o], [other]) > 100
    monkeypatch.setattr(attention_chunks_triton, "tile_keys", lambda dtype: 64)
    assert total_unequal([packed(case)[0]], [o]) > 100


@pytest.mark.parametrize("fault", ["descending", "not fused"])
def test_control_another_join_has_other_bits_before_o_is_rounded(monkeypatch, fault):
    """In fp32, as 16 bits hide most of a last bit. Chunks are joined in `_merge` only."""
    case = make_case([300, 290], 4, 1, 64, torch.float32, seed=5)
    expected, walked = decoded(case, 32)
    assert total_unequal([expected], [walked]) == 0
    if fault == "descending":
        launch = attention_split_triton.launch

        def reversed_states(kernel, grid, *args, **options):
            if kernel is attention_split_triton._merge:
                o, *states, sinks, lengths, heads, chunks = args
                for i, n in enumerate(-(-lengths // RULE.chunk)):
                    for x in states:
                        x[i, :, :n] = x[i, :, :n].flip(1)
                args = o, *states, sinks, lengths, heads, chunks
            launch(kernel, grid, *args, **options)

        monkeypatch.setattr(attention_split_triton, "launch", reversed_states)
    else:

        def unfused(M, L, A, m, l, acc):
            high = tl.maximum(M, m)
            base = tl.where(high > float("-inf"), high, 0.0)
            a, b = tl.exp2(M - base), tl.exp2(m - base)
            return high, l * b + L * a, acc * b[:, None] + A * a[:, None]

        monkeypatch.setattr(attention_split_triton, "join", unfused)
    o, _ = decoded(case, 32)
    assert total_unequal([o], [expected]) > 10


def test_no_result_is_a_negative_zero():
    case = make_case([40, 100], 2, 1, 32, torch.float32, seed=6)
    case = Case(case.lengths, case.q, case.k, torch.full_like(case.v, -1e-45))
    o, _ = packed(case)
    assert not ((o == 0) & o.signbit()).any()
    split, walked = decoded(case, 32)
    assert total_unequal([split, walked], [o[[39, 139]]] * 2) == 0


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy(dtype):
    assert_accurate(dtype, head_dim=64, rule=AttentionRule(64), lengths=[150, 40])


def test_programs_of_every_form_have_as_many_rows():
    rows = [
        chunk_state_triton.program_rows(torch.bfloat16, gpu)
        for gpu in ("hopper", "blackwell", "ampere", "amd")
    ]
    assert rows == [64, 128, 16, 16]
