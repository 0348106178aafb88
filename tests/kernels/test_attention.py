"""Attention of whole sequences, of chunks and of single tokens is one result, to the bit.

Chunks and single tokens read their keys from a cache of shuffled blocks.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.kernels import attention as attention_module
from zerokl.kernels import attention_plan, attention_ref
from zerokl.kernels.attention import attention, attention_cached, varlen_plan
from zerokl.kernels.attention_plan import AttentionPlan
from zerokl.kernels.attention_rule import WALK, AttentionRule

from tests.helpers import DTYPES, forgotten, property_settings, randn, threads, total_unequal


class Case(NamedTuple):
    """Packed sequences. q [T, Hq, D], k and v [T, Hkv, D]."""

    lengths: list[int]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def plan(self) -> AttentionPlan:
        return varlen_plan(self.lengths, self.q.shape[1], self.k.shape[1])

    def spans(self) -> list[slice]:
        ends = np.cumsum(self.lengths).tolist()
        return [slice(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]

    def sequence(self, s: int) -> "Case":
        rows = self.spans()[s]
        return Case([self.lengths[s]], self.q[rows], self.k[rows], self.v[rows])

    def with_others_nan(self, s: int) -> "Case":
        """A copy in which all sequences but `s` hold NaN."""
        tensors = [torch.full_like(x, float("nan")) for x in self[1:]]
        rows = self.spans()[s]
        for target, source in zip(tensors, self[1:], strict=True):
            target[rows] = source[rows]
        return Case(self.lengths, *tensors)


def make_case(lengths: list[int], group: int, kv_heads: int, D: int, dtype: torch.dtype, seed: int) -> Case:
    T = sum(lengths)
    heads = [group * kv_heads, kv_heads, kv_heads]
    return Case(lengths, *(randn(seed + i, T, h, D, dtype=dtype, scale=1.5) for i, h in enumerate(heads)))


def whole(case: Case, rule: AttentionRule = WALK, sinks: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        return attention(case.q, case.k, case.v, case.plan(), case.scale, rule, sinks)


def cached(
    case: Case,
    chunk: Callable[[np.random.Generator], int],
    seed: int,
    rule: AttentionRule = WALK,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sequences read chunk by chunk from blocks that are scattered over the cache.

    Each call has a random composition and order. A block holds zeros when a sequence takes it; every other
    block holds NaN.
    """
    rng = np.random.default_rng(seed)
    tile, kv_heads, D = attention_plan.KEY_TILE, case.k.shape[1], case.k.shape[2]
    needed = [-(-length // tile) for length in case.lengths]
    ids = rng.permutation(sum(needed) + 3)
    tables = np.full((len(needed), max(needed)), ids[-1])
    for row, blocks in zip(tables, np.split(ids[: sum(needed)], np.cumsum(needed)[:-1]), strict=True):
        row[: len(blocks)] = blocks
    tiles = torch.full((len(ids), kv_heads, 2, tile, D), float("nan"), dtype=case.q.dtype)
    tiles[ids[: sum(needed)]] = 0
    start, context = [rows.start for rows in case.spans()], [0] * len(needed)
    o = torch.full_like(case.q, float("nan"))
    while active := [s for s in rng.permutation(len(needed)) if context[s] < case.lengths[s]]:
        batch = active[: rng.integers(1, len(active) + 1)]
        sizes = [min(chunk(rng), case.lengths[s] - context[s]) for s in batch]
        position = np.concatenate([context[s] + np.arange(n) for s, n in zip(batch, sizes, strict=True)])
        rows = np.repeat([start[s] for s in batch], sizes) + position
        block = tables[np.repeat(batch, sizes), position // tile]
        for part, x in enumerate((case.k, case.v)):
            tiles[block, :, part, position % tile] = x[rows]
        plan = AttentionPlan(sizes, [context[s] for s in batch], tables[batch], case.q.shape[1], kv_heads)
        row_sinks = None if sinks is None else sinks[rows]
        o[rows] = attention_cached(
            case.q[rows], tiles.view(-1, 2, tile, D), plan, case.scale, rule, row_sinks
        )
        for s, n in zip(batch, sizes, strict=True):
            context[s] += n
    return o


def gradients(case: Case, dy: torch.Tensor, rule: AttentionRule = WALK) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in case[1:]]
    return torch.autograd.grad(attention(*leaves, case.plan(), case.scale, rule), leaves, dy)


def after_contexts(
    case: Case, contexts: list[int], dy: torch.Tensor, rule: AttentionRule = WALK
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """o, dq, dk, dv of the queries after `contexts` tokens of each sequence, computed in two ways.

    First alone. Second as rows of the whole sequences, where the earlier queries get no gradient. dy has the
    shape of q.
    """
    spans = zip(case.spans(), contexts, strict=True)
    rows = torch.cat([torch.arange(span.start + context, span.stop) for span, context in spans])
    queries = [n - context for n, context in zip(case.lengths, contexts, strict=True)]
    plan = varlen_plan(queries, case.q.shape[1], case.k.shape[1], contexts)
    leaves = [x.detach().clone().requires_grad_() for x in (case.q[rows], case.k, case.v)]
    o = attention(*leaves, plan, case.scale, rule)
    alone = o.detach(), *torch.autograd.grad(o, leaves, dy[rows])
    dq, dk, dv = gradients(case, torch.zeros_like(dy).index_copy_(0, rows, dy[rows]), rule)
    return alone, (whole(case, rule)[rows], dq[rows], dk, dv)


CHUNKS = {
    "one by one": lambda rng: 1,
    "short": lambda rng: int(rng.integers(1, 12)),
    "long": lambda rng: int(rng.integers(20, 120)),
    "all at once": lambda rng: 10_000,
}
cases = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(1, 200), min_size=1, max_size=4),
        "group": st.sampled_from([1, 2, 4, 7, 8]),
        "kv_heads": st.integers(1, 3),
        "D": st.sampled_from([16, 32, 48, 64, 80, 96, 112, 128]),
        "seed": st.integers(0, 10_000),
    }
)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@dtypes
@pytest.mark.parametrize("chunk", CHUNKS)
@property_settings(10)
@given(drawn=cases)
def test_prefill_chunks_and_decode_are_one_result(dtype, chunk, drawn):
    case = make_case(**drawn, dtype=dtype)
    assert total_unequal([whole(case)], [cached(case, CHUNKS[chunk], drawn["seed"])]) == 0


@pytest.fixture(params=[4, 16, 32])
def another_order(monkeypatch, request):
    """A library whose products of `request.param` rows sum in another order."""
    library = torch.bmm

    def bmm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        half = a.shape[2] // 2
        if a.shape[1] == request.param:
            y = library(a[..., :half], b[:, :half]) + library(a[..., half:], b[:, half:])
        else:
            y = library(a, b)
        return y if out is None else out.copy_(y)

    with forgotten(attention_plan._agree):
        monkeypatch.setattr(torch, "bmm", bmm)
        yield


@pytest.mark.usefixtures("references", "another_order")
def test_query_tiles_with_other_bits_are_not_taken(monkeypatch):
    case = make_case([150, 3, 40], 4, 2, 64, torch.float32, seed=2)
    # Their query tiles have 4, 16 and 32 rows.
    chunks = CHUNKS["one by one"], lambda rng: 5, CHUNKS["all at once"]
    assert [total_unequal([whole(case)], [cached(case, chunk, 2)]) for chunk in chunks] == [0, 0, 0]
    # control: without the probe these tiles would be taken, and the bits would differ
    monkeypatch.setattr(attention_plan, "_agree", lambda *_: True)
    assert sum(total_unequal([whole(case)], [cached(case, chunk, 2)]) for chunk in chunks) > 0


@pytest.mark.parametrize(
    ("lengths", "group", "rows"),
    [([1, 1], 4, 4), ([1, 1], 5, 8), ([80], 4, 32), ([4, 4], 4, 16), ([80], 40, 40)],
)
def test_query_tiles_suit_the_lengths(lengths, group, rows):
    assert attention_plan.tile_rows(lengths, group, 64, torch.float32) == rows


@dtypes
@pytest.mark.parametrize("group", [1, 2, 4, 7, 8])
def test_every_group_size_decodes_as_it_was_prefilled(dtype, group):
    case = make_case([1, 31, 32, 33, 65], group, 2, 64, dtype, seed=group)
    assert total_unequal([whole(case)], [cached(case, CHUNKS["one by one"], group)]) == 0


@dtypes
@property_settings(15)
@given(drawn=cases, pick=st.integers(0, 3))
def test_sequence_is_independent_of_what_it_is_packed_with(dtype, drawn, pick):
    case = make_case(**drawn, dtype=dtype)
    s = pick % len(case.lengths)
    rows, poisoned = case.spans()[s], case.with_others_nan(s)
    dy = randn(drawn["seed"] + 9, *case.q.shape, dtype=dtype)
    alone = case.sequence(s)
    assert total_unequal([whole(alone)], [whole(case)[rows]]) == 0
    assert total_unequal([whole(alone)], [whole(poisoned)[rows]]) == 0
    assert total_unequal([whole(alone)], [cached(poisoned, CHUNKS["long"], drawn["seed"])[rows]]) == 0
    expected = gradients(alone, dy[rows])
    assert total_unequal(expected, [g[rows] for g in gradients(case, dy)]) == 0
    assert total_unequal(expected, [g[rows] for g in gradients(poisoned, dy)]) == 0


@dtypes
@property_settings(15)
@given(drawn=cases)
def test_queries_after_a_context_are_those_of_the_whole_sequence(dtype, drawn):
    case, rng = make_case(**drawn, dtype=dtype), np.random.default_rng(drawn["seed"])
    contexts = [int(rng.integers(n)) for n in case.lengths]
    dy = randn(drawn["seed"] + 9, *case.q.shape, dtype=dtype)
    alone, rows_of_whole = after_contexts(case, contexts, dy)
    assert total_unequal(alone, rows_of_whole) == 0


def test_control_a_context_that_is_one_token_off_is_found():
    case = make_case([50, 90], 2, 1, 32, torch.float32, seed=8)
    dy = randn(9, *case.q.shape)
    right, wrong = (after_contexts(case, contexts, dy)[0] for contexts in ([20, 40], [21, 39]))
    for a, b in zip(right, wrong, strict=True):
        assert total_unequal([a], [b]) > 0


@dtypes
def test_earlier_positions_do_not_see_later_ones(dtype):
    case = make_case([150], 2, 2, 32, dtype, seed=0)
    for length in (1, 31, 32, 33, 100):
        prefix = Case([length], *(x[:length] for x in case[1:]))
        assert total_unequal([whole(prefix)], [whole(case)[:length]]) == 0


@dtypes
def test_result_is_independent_of_the_number_of_threads(dtype):
    case = make_case([5, 200, 131, 64], 7, 2, 64, dtype, seed=1)
    dy = randn(2, *case.q.shape, dtype=dtype)

    def run(n: int) -> tuple[torch.Tensor, ...]:
        with threads(n):
            return whole(case), *gradients(case, dy)

    one_thread = run(1)
    assert total_unequal(one_thread, run(2)) == 0
    assert total_unequal(one_thread, run(4)) == 0


def test_memory_bound_of_the_backward_decides_no_bit(monkeypatch):
    case = make_case([40, 50, 60, 33, 64], 2, 2, 32, torch.float32, seed=3)
    dy = randn(4, *case.q.shape)
    # Three of the sequences are padded to one length.
    contexts = [0, 49, 33, 32, 1]
    together, after = gradients(case, dy), after_contexts(case, contexts, dy)[0]
    monkeypatch.setattr(attention_ref, "SCORE_ELEMENTS", 1)
    assert total_unequal(together, gradients(case, dy)) == 0
    assert total_unequal(after, after_contexts(case, contexts, dy)[0]) == 0


@pytest.mark.usefixtures("references")
@dtypes
def test_control_another_key_tile_is_found(dtype, monkeypatch):
    # So many elements that bf16's rounding does not hide every difference.
    case = make_case([700, 800], 2, 2, 64, dtype, seed=5)
    before = whole(case)
    for module in (attention_plan, attention_ref, attention_module):
        monkeypatch.setattr(module, "KEY_TILE", 16)
    after = cached(case, CHUNKS["long"], 0)
    assert total_unequal([whole(case)], [after]) == 0  # the narrower tile is consistent with itself
    assert total_unequal([before], [after]) > 0


def test_control_another_query_chunk_of_the_backward_is_found(monkeypatch):
    case = make_case([200], 2, 2, 64, torch.float32, seed=6)
    dy = randn(7, *case.q.shape)
    before = gradients(case, dy)
    monkeypatch.setattr(attention_ref, "QUERY_CHUNK", 64)
    assert total_unequal(before, gradients(case, dy)) > 0


def _qkv(T: int = 5, heads: int = 4, kv_heads: int = 2, D: int = 16) -> list[torch.Tensor]:
    return [torch.zeros(T, h, D) for h in (heads, kv_heads, kv_heads)]


def test_refusals_name_what_is_wrong():
    with pytest.raises(ValueError, match=r"lengths \(\[3, 0\]\) must be positive"):
        varlen_plan([3, 0], 4, 2)
    for contexts in ([0, -1], [0]):
        with pytest.raises(ValueError, match=r"contexts \(\[0.*\]\) not negative, one each a sequence"):
            varlen_plan([3, 1], 4, 2, contexts)
    with pytest.raises(ValueError, match=r"heads \(5\) must be a multiple of kv_heads \(2\)"):
        varlen_plan([3], 5, 2)
    with pytest.raises(ValueError, match=r"q \(6, 4, 16\).*\[5, 4, D\]"):
        attention(*_qkv(T=6), varlen_plan([5], 4, 2), 1.0)
    with pytest.raises(ValueError, match=r"k \(5, 2, 16\).*\[7, 2, D\] twice"):
        attention(*_qkv(T=5), varlen_plan([5], 4, 2, [2]), 1.0)
    with pytest.raises(ValueError, match=r"head_dim \(24\) must be a multiple of 16"):
        attention(*_qkv(D=24), varlen_plan([5], 4, 2), 1.0)
    with pytest.raises(ValueError, match=r"tiles \(3, 2, 16, 16\) must be \[tiles, 2, 32, 16\]"):
        attention_cached(_qkv()[0], torch.zeros(3, 2, 16, 16), varlen_plan([5], 4, 2), 1.0)
    with pytest.raises(
        ValueError,
        match=r"tiles.dtype \(torch.float16\) must be q.dtype \(torch.bfloat16\) or a narrower one",
    ):
        attention_cached(_qkv()[0].bfloat16(), torch.zeros(3, 2, 32, 16).half(), varlen_plan([5], 4, 2), 1.0)
