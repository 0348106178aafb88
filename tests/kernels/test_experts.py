"""A mixture of experts beside a slow one: token by token, slot by slot, rounded where it must be."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from zerokl.kernels import expert_rows
from zerokl.kernels import grouped_linear as module
from zerokl.kernels.expert_rows import ExpertRows
from zerokl.kernels.given_softmax import given_softmax
from zerokl.kernels.grad import GradBuffer
from zerokl.kernels.grouped_linear import grouped_linear
from zerokl.kernels.linear import linear
from zerokl.kernels.low_rank import AdapterBuffers, LowRankBuffers
from zerokl.kernels.matmul import THROUGH_FP32
from zerokl.kernels.order import token_blocks
from zerokl.kernels.passes import Pass
from zerokl.kernels.silu_mul import silu_mul
from zerokl.kernels.topk_softmax import _lane_sum, topk_softmax

from tests.helpers import DTYPES, forgotten, randint, randn, total_unequal
from tests.law.experts import CHOSEN, EXPERTS, INNER, mixture, weights

T, D = 50, 48


def coarse(x: torch.Tensor) -> torch.Tensor:
    """x in steps of a half, so that many tokens have experts of equal logits."""
    return (x * 2).round() / 2


def chosen(p: np.ndarray, ties: str) -> list[int]:
    """The experts of the largest probabilities; of equal ones the lower, or the higher, comes first."""
    sign = 1 if ties == "lower" else -1
    return sorted(range(len(p)), key=lambda e: (-p[e], sign * e))[:CHOSEN]


def lane_sum(terms_TE: torch.Tensor, load: int) -> torch.Tensor:
    return torch.from_numpy(_lane_sum(terms_TE.numpy(), load))


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [1, K] by w [N, K], as the first of 32 rows that the library multiplies in one thread."""
    if x.dtype in THROUGH_FP32:
        return product(x.float(), w.float()).to(x.dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    y = torch.mm(torch.cat([x, torch.zeros(31, x.shape[1], dtype=x.dtype)]), w.clone().t())[:1]
    torch.set_num_threads(threads)
    return y


def one_token(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ties: str = "lower",
    slots: Callable = list,
    weigh: str = "before rounding",
) -> torch.Tensor:
    """The output of one token, [1, D]. x [1, D], logits [E]. slots: the order in which they are added."""
    terms = torch.exp(logits.float() - logits.float().max())
    p = (terms * (1.0 / lane_sum(terms.unsqueeze(0), 16 // logits.element_size()))).numpy()
    ids = chosen(p, ties)
    scale = np.float32(1.0) / ((p[ids[0]] + p[ids[1]]) + p[ids[2]])
    y = torch.zeros(1, x.shape[1])
    for e in slots(ids):
        gate_up_e, down_e = gate_up.chunk(EXPERTS)[e], down.chunk(EXPERTS)[e]
        h, q = silu_mul(product(x, gate_up_e)), float(p[e] * scale)
        if weigh == "before rounding":
            y += (product(h.float(), down_e.float()) * q).to(x.dtype).float()
        elif weigh == "after rounding":
            y += (product(h, down_e).float() * q).to(x.dtype).float()
        else:
            y += product((h.float() * q).to(x.dtype), down_e).float()
    return y.to(x.dtype)


def slow(x: torch.Tensor, logits: torch.Tensor, w: list[torch.Tensor], **other: object) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([one_token(x[t : t + 1], logits[t], *w, **other) for t in range(len(x))])


def both(dtype: torch.dtype, **other: object) -> int:
    """How many elements differ between the mixture and the slow one, for logits many of which are equal."""
    x, (router, *w) = randn(0, T, D, dtype=dtype), weights(D, dtype, 5)
    router = coarse(router * 8)
    x = coarse(x)
    ours = mixture(x, router, *w)[0]
    return total_unequal([ours], [slow(x, linear(x, router), w, **other)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_has_the_bits_of_a_token_by_token_mixture(dtype):
    assert both(dtype) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("other", [{"ties": "higher"}, {"weigh": "before the product"}])
def test_control_another_rule_is_found(dtype, other):
    assert both(dtype, **other) > 0


@pytest.mark.parametrize("slots", [sorted, reversed])
def test_control_another_order_of_the_slots_is_found_in_fp32(slots):
    """In 16 bits, the rounding of the sum nearly always hides the order."""
    assert both(torch.float32, slots=slots) > 0


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_control_a_rounding_before_the_weight_is_found(dtype):
    assert both(dtype, weigh="after rounding") > 0


def test_control_another_order_of_the_slots_is_found():
    ids = torch.tensor([[2, 0, 1]])
    rows = ExpertRows(ids, 3)
    x = torch.zeros(len(rows.tokens), 1)
    x[rows.places[0]] = torch.tensor([[-1e8], [1e8], [1.0]])  # of the experts 2, 0 and 1
    assert rows.sum_slots(x).item() == (-1e8 + 1e8) + 1.0
    by_expert = x[rows.places[0].sort().values]
    assert (by_expert[0] + by_expert[1] + by_expert[2]).item() == 0.0


def butterfly(terms: np.ndarray, load: int) -> np.float32:
    """The sum of a row in the order of vLLM's kernel, number by number and lane by lane."""
    padded = np.zeros(1 << (len(terms) - 1).bit_length(), np.float32)
    padded[: len(terms)] = terms
    load = min(load, len(padded))
    loads = max(1, len(padded) // (load * 32))
    lanes = len(padded) // (load * loads)
    sums = np.zeros(lanes, np.float32)
    for lane in range(lanes):
        for i in range(loads):
            for j in range(load):
                sums[lane] += padded[(i * lanes + lane) * load + j]
    mask = lanes // 2
    while mask:
        sums = np.array([sums[lane] + sums[lane ^ mask] for lane in range(lanes)], np.float32)
        mask //= 2
    return sums[0]


@pytest.mark.parametrize("load", [2, 4, 8])
@pytest.mark.parametrize("E", [1, 2, 6, 8, 64, 128, 256, 512])
def test_lanes_are_added_as_a_butterfly(E, load):
    terms = randn(E, 1, E).exp()
    assert lane_sum(terms, load).item() == butterfly(terms[0].numpy(), load)


@pytest.mark.parametrize(("dtype", "load"), [(torch.float32, 4), (torch.bfloat16, 8), (torch.float16, 8)])
def test_the_dtype_of_the_logits_decides_the_lanes(dtype, load):
    logits = randn(0, 100, 128, dtype=dtype)
    q, ids = topk_softmax(logits, 8, renormalise=False)
    terms = torch.exp(logits.float() - logits.float().amax(1, keepdim=True))
    for loads in (load, 12 - load):  # control: the lanes of the other dtypes
        scale = torch.tensor([1.0 / butterfly(row, loads) for row in terms.numpy()]).unsqueeze(1)
        assert (total_unequal([q], [(terms * scale).gather(1, ids)]) == 0) == (loads == load)


def test_control_the_order_of_the_lanes_decides_bits():
    terms = randn(0, 100, 128).exp()
    assert total_unequal([lane_sum(terms, 8)], [lane_sum(terms, 4)]) > 0
    assert total_unequal([lane_sum(terms, 8)], [terms.flip(1).cumsum(1)[:, -1]]) > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_equal_logits_the_lower_experts_are_chosen(dtype):
    q, ids = topk_softmax(torch.zeros(3, 64, dtype=dtype), 5, renormalise=True)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert total_unequal([q], [q[:1, :1].expand(3, 5)]) == 0
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0]], dtype=dtype)
    assert topk_softmax(logits, 3, renormalise=False)[1].tolist() == [[1, 3, 2]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_logit_that_is_not_finite_makes_the_weights_of_its_token_nan(dtype, renormalise, bad):
    logits = randn(0, 3, 6, dtype=dtype)
    finite, _ = topk_softmax(logits, 2, renormalise)
    logits[1, 4] = bad
    q, ids = topk_softmax(logits, 2, renormalise)
    assert q.isnan().tolist() == [[False] * 2, [True] * 2, [False] * 2]
    assert ids[1].tolist() == [0, 1]
    assert total_unequal([q[::2]], [finite[::2]]) == 0
    assert given_softmax(logits, ids, renormalise).isnan().tolist() == q.isnan().tolist()


def test_a_logit_of_minus_infinity_is_an_expert_that_nobody_chooses():
    q, ids = topk_softmax(torch.tensor([[1.0, -torch.inf, 1.0]]), 3, renormalise=True)
    assert (q.tolist(), ids.tolist()) == ([[0.5, 0.5, 0.0]], [[0, 2, 1]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_experts_gradient_is_that_of_a_linear_over_its_tokens(dtype):
    """Its tokens in a sequence are cut into blocks. An expert without tokens has exact zeros."""
    lengths, N = [150, 20, 130], 32
    # Experts 0 to 3 of 5, and more than a block of the first sequence's tokens for expert 0.
    ids = torch.stack([randint(1, 9, 300) // 8, 2 + randint(2, 2, 300)], 1)
    rows, x = ExpertRows(ids, 5), randn(0, 300, D, dtype=dtype)
    w = randn(1, 5 * N, D, dtype=dtype).requires_grad_()
    buffer = GradBuffer(torch.full((1, *w.shape), float("nan")), empty=[0])
    dy, blocks = randn(2, len(rows.tokens), N, dtype=dtype), token_blocks(lengths)
    grouped_linear(x, w, rows, Pass(blocks, {w: buffer})).backward(dy)
    for e, (dw, w_e) in enumerate(zip(buffer.sums[0].chunk(5), w.detach().chunk(5), strict=True)):
        tokens = [t for t in range(300) if e in ids[t]]
        counts = [sum(start <= t < end for t in tokens) for start, end in ((0, 150), (150, 170), (170, 300))]
        expected = GradBuffer(torch.zeros(1, N, D))
        w_e = w_e.clone().requires_grad_()
        in_pass = Pass(token_blocks(counts), {w_e: expected})
        start = next((a for expert, a, _ in rows.segments if expert == e), 0)
        linear(x[tokens], w_e, None, in_pass).backward(dy[start : start + len(tokens)])
        assert total_unequal([dw], [expected.sums[0]]) == 0
        assert dw.any() == (e < 4)


def low_rank(parts: list[tuple[slice, torch.Tensor, torch.Tensor]]) -> LowRankBuffers:
    """Adapters with buffers that hold NaN and count as empty."""
    buffers = [[GradBuffer(torch.full((1, *x.shape), float("nan")), [0]) for x in ba] for _, *ba in parts]
    return LowRankBuffers(
        tuple(AdapterBuffers(*part, 5 / 3, *sums) for part, sums in zip(parts, buffers, strict=True))
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_adapters_of_an_expert_have_the_gradient_of_a_linear_over_its_tokens(dtype):
    """Those of the last rows of each expert's matrix. Tokens and blocks are those of the test above."""
    lengths, N, first = [150, 20, 130], 32, 12
    ids = torch.stack([randint(1, 9, 300) // 8, 2 + randint(2, 2, 300)], 1)
    rows, x = ExpertRows(ids, 5), randn(0, 300, D, dtype=dtype)
    w = randn(1, 5 * N, D, dtype=dtype).requires_grad_()
    factors = [(randn(10 + e, N - first, 3), randn(20 + e, 3, D)) for e in range(5)]
    parts = [(slice(e * N + first, (e + 1) * N), *ba) for e, ba in enumerate(factors)]
    buffers, dy = low_rank(parts), randn(2, len(rows.tokens), N, dtype=dtype)
    grouped_linear(x, w, rows, Pass(token_blocks(lengths), {w: buffers})).backward(dy)
    for e, (_, first_row, end) in enumerate(rows.segments):
        tokens = [t for t in range(300) if e in ids[t]]
        counts = [sum(start <= t < end for t in tokens) for start, end in ((0, 150), (150, 170), (170, 300))]
        w_e = w.detach().chunk(5)[e].clone().requires_grad_()
        expected = low_rank([(slice(first, N), *factors[e])])
        in_pass = Pass(token_blocks(counts), {w_e: expected})
        linear(x[tokens], w_e, None, in_pass).backward(dy[first_row : first_row + len(tokens)])
        for name in ("db", "da"):
            grouped, sums = (getattr(each, name).sums for each in (buffers.adapters[e], expected.adapters[0]))
            assert total_unequal([grouped], [sums]) == 0, (e, name)
            assert grouped.any()
        assert first_row + len(tokens) <= end
    assert len(rows.segments) == 4
    assert buffers.adapters[4].db.empty == buffers.adapters[4].da.empty == {0}, "expert 4 has no tokens"


@pytest.mark.parametrize("experts", [1, 7])
def test_no_tokens_and_one_expert_are_taken(experts):
    router, gate_up, _ = (w.chunk(EXPERTS)[0].repeat(experts, 1) for w in weights(D, torch.float32, 0))
    q, ids = topk_softmax(linear(torch.ones(0, D), router), 1, renormalise=True)
    rows = ExpertRows(ids, experts)
    assert grouped_linear(torch.ones(0, D), gate_up, rows).shape == (0, 2 * INNER)
    assert q.shape == (0, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: topk_softmax(torch.zeros(2, 4), 5, True), r"k \(5\) in 1..E"),
        (lambda: topk_softmax(torch.zeros(2, 4, dtype=torch.int32), 1, True), "must be float32"),
        (
            lambda: grouped_linear(torch.zeros(1, 4), torch.zeros(7, 4), ExpertRows(torch.tensor([[0]]), 2)),
            "of 2 experts",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_call_for_all_experts_decides_no_bit(dtype, monkeypatch):
    x, w = randn(0, T, D, dtype=dtype), weights(D, dtype, 5)
    assert ExpertRows(mixture(x, *w)[2], EXPERTS).equal
    in_one_call = mixture(x, *w)[0]
    monkeypatch.setattr(expert_rows, "_MOST_EQUAL", 0)
    assert not ExpertRows(mixture(x, *w)[2], EXPERTS).equal
    assert total_unequal([mixture(x, *w)[0]], [in_one_call]) == 0


def test_a_batched_product_with_other_bits_is_not_taken(monkeypatch):
    x, w, library = randn(0, T, D), weights(D, torch.float32, 5), torch.bmm
    expected = mixture(x, *w)[0]

    def bmm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return library(x[..., :16], w[:, :16]) + library(x[..., 16:], w[:, 16:])

    with forgotten(module._bmm_agrees):
        monkeypatch.setattr(torch, "bmm", bmm)
        assert total_unequal([mixture(x, *w)[0]], [expected]) == 0
        monkeypatch.setattr(module, "_bmm_agrees", lambda *_: True)
        assert total_unequal([mixture(x, *w)[0]], [expected]) > 0, "control: without the probe"
