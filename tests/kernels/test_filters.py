"""Filters together: what is drawn from is what is scored, the kept set and its probabilities, the order.

The order is that of vLLM 0.32 (v1/sample/sampler.py): allowed tokens and the bias
(Sampler.apply_logits_processors), the temperature and min-p (Sampler.sample), then top-k and top-p
(v1/sample/ops/topk_topp_sampler.py). tests/vllm/test_filters.py runs vLLM's own processors beside it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.kernels import logprob, truncation
from zerokl.kernels.draw import draw_tokens
from zerokl.kernels.logprob import linear_logprob, token_logprobs
from zerokl.kernels.matmul import matmul
from zerokl.kernels.philox import Stream, uniform_range
from zerokl.kernels.sampling_params import PENALTIES, SamplingParams, refuse_penalties
from zerokl.kernels.truncation import logit_offset, scaled_logits

from tests.helpers import DTYPES, assert_at_most_twice_the_error, property_settings, randn, total_unequal

V, D, T = 53, 24, 40
INF = float("inf")
# Everything is a multiple of 1/256, or a power of two, so that fp64 computes the same z as fp32.
BIAS = st.integers(-1500, 1500).map(lambda n: n / 256)
PARAMS = st.builds(
    SamplingParams.of,
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 17, 53, 90]),
    top_p=st.sampled_from([0.013, 0.31, 0.57, 0.93, 1.0]),
    # No difference of two z is near the log of one of these.
    min_p=st.sampled_from([0.0, 0.003, 0.05, 0.3, 1.0]),
    logit_bias=st.dictionaries(st.integers(0, V - 1), BIAS, max_size=9),
    allowed_token_ids=st.none() | st.sets(st.integers(0, V - 1), min_size=1),
)
EVERYTHING = SamplingParams.of(0.9, 20, 0.95, 0.01, {4: 4.0, 8: -2.5}, range(0, V, 2))


def uniforms(n: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(uniform_range(n, seed, Stream.SAMPLE))


def drawn_and_scored(params: SamplingParams, dtype: torch.dtype, seed: int) -> list[tuple[torch.Tensor, ...]]:
    """logp of T tokens: as the sampler has it, token by token, and as the trainer has it, all at once."""
    h, w = randn(seed, T, D, dtype=dtype), randn(seed + 1, V, D, dtype=dtype, scale=0.5)
    u = uniforms(T, seed)
    rows = [draw_tokens(matmul(h[t : t + 1], w), u[t : t + 1], params) for t in range(T)]
    ids, drawn = (torch.cat(column) for column in zip(*rows, strict=True))
    scored = linear_logprob(h.requires_grad_(), w.requires_grad_(), ids, params)[0].detach()
    with torch.no_grad():
        without_grad = linear_logprob(h, w, ids, params)[0]
    return [(drawn, drawn), (scored, without_grad)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@property_settings(60)
@given(params=PARAMS, greedy=st.sampled_from([False, False, False, True]), seed=st.integers(0, 1000))
def test_the_trainer_scores_with_the_distribution_that_was_drawn_from(dtype, params, greedy, seed):
    params = params._replace(temperature=0.0) if greedy else params
    drawn, scored = drawn_and_scored(params, dtype, seed)
    assert total_unequal(drawn, scored) == 0
    assert torch.isfinite(drawn[0]).all()


def kept_and_logprobs(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """Token id -> logp of each kept token, in fp64 and by probabilities, in vLLM's order."""
    bias, allowed = dict(params.logit_bias), params.allowed_token_ids
    kept = sorted(range(len(logits)) if allowed is None else allowed)
    z = {i: (logits[i] + bias.get(i, 0.0)) / params.temperature for i in kept}

    def probabilities() -> dict[int, float]:
        row = torch.softmax(torch.tensor([z[i] for i in kept], dtype=torch.float64), 0)
        return dict(zip(kept, row.tolist(), strict=True))

    p = probabilities()
    kept = [i for i in kept if p[i] >= params.min_p * max(p.values())]
    ranked = sorted(kept, key=lambda i: (z[i], i), reverse=True)
    if 0 < params.top_k < len(ranked):
        kept = [i for i in kept if z[i] >= z[ranked[params.top_k - 1]]]
        ranked = [i for i in ranked if i in kept]
    if params.top_p < 1.0:
        p, reached = probabilities(), 0.0
        for count, i in enumerate(ranked, start=1):
            reached += p[i]
            if reached >= params.top_p:
                kept = sorted(ranked[:count])
                break
    return {i: float(torch.tensor(x, dtype=torch.float64).log()) for i, x in probabilities().items()}


@property_settings(200)
@given(params=PARAMS, seed=st.integers(0, 10_000), steps=st.sampled_from([2.0, 256.0]))
def test_the_kept_set_and_its_logprobs_equal_slow_independent_ones(params, seed, steps):
    # Steps of 1/2 are so coarse that some logits tie.
    logits = (randn(seed, 3, V, scale=2.0) * steps).round() / steps
    z = scaled_logits(logits, params)
    for row, z_row in zip(logits, z, strict=True):
        expected = kept_and_logprobs(row.tolist(), params)
        ids = torch.tensor(list(expected))
        assert (z_row > -INF).nonzero().flatten().tolist() == ids.tolist()
        ours = token_logprobs(z_row.expand(len(ids), V), ids)[0]
        plain = torch.log_softmax(z_row, 0)[ids]
        exact = torch.tensor(list(expected.values()), dtype=torch.float64)
        # Plain torch may be exact by luck on so few numbers. So each of them may be half a unit off as well.
        allowed = (plain.double() - exact).abs() + 2.0**-24 * exact.abs().clamp(min=1.0)
        assert_at_most_twice_the_error(ours, exact + allowed, exact, str(params))


P = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
ORDER: dict[str, tuple[torch.Tensor, SamplingParams, list[float]]] = {
    # Of the kept 4 : 3 : 2, the first two reach 0.75. Top-p first would keep three, and min-p all of them.
    "min-p before top-p": (P.log(), SamplingParams(1.0, 0, 0.75, 0.4), [4 / 7, 3 / 7, 0, 0]),
    # Top-k first would keep token 0, and no token would be left.
    "allowed before top-k": (P.log(), SamplingParams.of(1.0, 1, allowed_token_ids=[2, 3]), [0, 0, 1, 0]),
    "allowed before min-p": (
        P.log(),
        SamplingParams.of(min_p=0.9, allowed_token_ids=[2, 3]),
        [0, 0, 1, 0],
    ),
    # e^((ln 0.1 + 2 ln 2) / 2) = sqrt(0.4). A bias after the temperature would give 4 sqrt(0.1).
    "bias before temperature": (
        torch.tensor([[0.4, 0.4, 0.1, 0.1]]).log(),
        SamplingParams.of(2.0, logit_bias={3: 2 * torch.tensor(2.0).log().item()}),
        [2 / 7, 2 / 7, 1 / 7, 2 / 7],
    ),
    # The bias makes token 3 the likeliest. Min-p first would leave it out.
    "bias before min-p": (
        P.log(),
        SamplingParams.of(min_p=0.5, logit_bias={3: torch.tensor(16.0).log().item()}),
        [0, 0, 0, 1],
    ),
    # p^2 is 16 : 9 : 4 : 1, and 9/16 is below 0.6. Min-p before the temperature would keep 0.3 >= 0.24.
    "temperature before min-p": (P.log(), SamplingParams(0.5, 0, 1.0, 0.6), [1, 0, 0, 0]),
}


# A logit near 1, the bias and the temperature are each rounded in fp32.
ROUNDINGS = 8 * 2.0**-23


def probabilities(logits: torch.Tensor, params: SamplingParams) -> list[float]:
    """Of the one row of logits [1, V]."""
    return torch.softmax(scaled_logits(logits, params).double(), 1)[0].tolist()


@pytest.mark.parametrize("name", ORDER)
def test_filters_come_in_vllms_order(name):
    logits, params, expected = ORDER[name]
    assert probabilities(logits, params) == pytest.approx(expected, rel=ROUNDINGS, abs=0.0)


def without(monkeypatch: pytest.MonkeyPatch, **left_out: Any) -> None:
    """The trainer leaves parameters out when it scores."""
    scaled = truncation.scaled_logits_ref
    monkeypatch.setattr(
        logprob, "scaled_logits_ref", lambda z, params: scaled(z, params._replace(**left_out))
    )


@pytest.mark.parametrize(
    "left_out", [{"logit_bias": ()}, {"allowed_token_ids": None}, {"min_p": 0.0}], ids=str
)
def test_control_a_filter_that_is_left_out_of_the_score_is_found(monkeypatch, left_out):
    params = SamplingParams.of(0.9, 0, 1.0, 0.1, {4: 4.0, 8: -2.5}, range(0, V, 2))
    assert total_unequal(*drawn_and_scored(params, torch.float32, 1)) == 0
    without(monkeypatch, **left_out)
    assert total_unequal(*drawn_and_scored(params, torch.float32, 1)) > 0


def _min_p_last(*args: Any) -> torch.Tensor:
    """Min-p after top-p, as transformers has it."""
    z, params, *others = args
    z = truncation_in_order(z, params._replace(min_p=0.0), *others)
    return truncation_in_order(z, SamplingParams(min_p=params.min_p), None, *others[1:])


def _bias_last(*args: Any) -> torch.Tensor:
    """The bias after the temperature."""
    z, params, offset, *others = args
    return truncation_in_order(z / params.temperature, params._replace(temperature=1.0), offset, *others)


truncation_in_order: Callable[..., torch.Tensor] = truncation._scaled


@pytest.mark.parametrize(
    ("planted", "found_by"),
    [(_min_p_last, "min-p before top-p"), (_bias_last, "bias before temperature")],
    ids=["min-p last", "bias last"],
)
def test_control_another_order_is_found(monkeypatch, planted, found_by):
    monkeypatch.setattr(truncation, "_scaled", planted)
    logits, params, expected = ORDER[found_by]
    assert probabilities(logits, params) != pytest.approx(expected, rel=ROUNDINGS, abs=0.0)


def test_filters_that_are_off_change_no_bit():
    logits = randn(0, 30, V)
    logits[0, :5] = torch.tensor([0.0, -0.0, -0.0, 0.0, -1e-45])
    offset = logit_offset(
        SamplingParams.of(logit_bias={50: 1.0}, allowed_token_ids=range(51)), V, logits.device
    )
    assert total_unequal([(logits + offset)[:, :50]], [logits[:, :50]]) == 0
    everything = SamplingParams.of(0.7, 5, 0.9, 0.0, {}, range(V))
    plain = SamplingParams(0.7, 5, 0.9)
    assert total_unequal([scaled_logits(logits, everything)], [scaled_logits(logits, plain)]) == 0
    assert logit_offset(plain, V, logits.device) is None


def test_a_greedy_draw_takes_the_bias_and_the_allowed_tokens_and_no_min_p():
    logits, greedy = randn(4, 30, V), EVERYTHING._replace(temperature=0.0)
    z = scaled_logits(logits, greedy)
    expected = logits.clone()
    expected[:, 1::2] = -INF
    expected[:, 4] += 4.0
    expected[:, 8] -= 2.5
    assert total_unequal([z], [expected]) == 0
    assert draw_tokens(logits, uniforms(30, 0), greedy)[0].tolist() == z.argmax(1).tolist()


def test_the_gradient_of_a_filtered_logprob_is_as_accurate_as_plain_torchs():
    h, w, dlogp = randn(0, T, D), randn(1, V, D, scale=0.5), randn(2, T)
    ids = draw_tokens(matmul(h, w), uniforms(T, 3), EVERYTHING)[0]
    kept = scaled_logits(matmul(h, w), EVERYTHING) > -INF
    bias = torch.zeros(V, dtype=torch.float64)
    bias[[4, 8]] = torch.tensor([4.0, -2.5], dtype=torch.float64)

    def plain(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).detach().requires_grad_() for x in (h, w)]
        z = ((leaves[0] @ leaves[1].t() + bias.to(dtype)) / 0.9).masked_fill(~kept, -INF)
        logp = torch.log_softmax(z, 1).gather(1, ids.unsqueeze(1)).squeeze(1)
        return list(torch.autograd.grad(logp, leaves, dlogp.to(dtype)))

    leaves = [x.clone().requires_grad_() for x in (h, w)]
    ours = torch.autograd.grad(linear_logprob(*leaves, ids, EVERYTHING)[0], leaves, dlogp)
    for name, got, near, exact in zip("hw", ours, plain(torch.float32), plain(torch.float64), strict=True):
        assert_at_most_twice_the_error(got, near, exact, f"d{name}")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(min_p=-0.1), r"min_p \(-0.1\) must lie in \[0, 1\]"),
        (SamplingParams(min_p=float("nan")), r"min_p \(nan\)"),
        (
            SamplingParams.of(logit_bias={V: 1.0}),
            rf"logit_bias holds {V}, which is no token id, outside .* {V}",
        ),
        (SamplingParams.of(logit_bias={-1: 1.0}), "logit_bias holds -1, which is no token id"),
        (
            SamplingParams.of(logit_bias={3: 100.5}),
            r"logit_bias \(100.5\) of token 3 must lie in -100 to 100",
        ),
        (SamplingParams.of(logit_bias={3: float("nan")}), r"logit_bias \(nan\) of token 3"),
        (SamplingParams.of(logit_bias={3: -INF}), r"logit_bias \(-inf\) of token 3"),
        (
            SamplingParams.of(logit_bias=[(3, 1.0), (3, 2.0)]),
            "token 3 follows 3, and each id must be there once",
        ),
        (SamplingParams.of(allowed_token_ids=[]), "allowed_token_ids is empty, so no token could be drawn"),
        (SamplingParams.of(allowed_token_ids=[0, V]), f"allowed_token_ids holds {V}, which is no token id"),
        (SamplingParams.of(allowed_token_ids=[True]), "allowed_token_ids holds True, which is no token id"),
        (SamplingParams.of(allowed_token_ids="ab"), "allowed_token_ids holds 'a', which is no token id"),
        (SamplingParams(allowed_token_ids=(5, 3)), "allowed_token_ids: token 3 follows 5"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_filter_that_cannot_be_is_refused_in_one_line(params, message):
    h, w, ids = torch.zeros(1, 4), torch.zeros(V, 4), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=message) as refusal:
        linear_logprob(h, w, ids, params)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("given_as", "message"),
    [
        ({"logit_bias": 3}, r"logit_bias \(3\) must be pairs of a token id and a number"),
        ({"logit_bias": {3: "much"}}, "logit_bias .* must be pairs"),
        ({"logit_bias": [3, 4]}, "logit_bias .* must be pairs"),
        ({"logit_bias": {"a": 1.0, 3: 1.0}}, "logit_bias .* must be pairs"),
        ({"allowed_token_ids": 3}, r"allowed_token_ids \(3\) must be token ids"),
        ({"allowed_token_ids": [3, "a"]}, "allowed_token_ids .* must be token ids"),
    ],
    ids=str,
)
def test_what_is_no_filter_is_refused_in_one_line(given_as, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams.of(**given_as)


def test_a_penalty_that_is_off_passes_and_no_other():
    refuse_penalties("test", PENALTIES | {"top_p": 0.5})
    refuse_penalties("test", dict.fromkeys(PENALTIES))
    for name, off in PENALTIES.items():
        with pytest.raises(ValueError, match=f"test: {name} \\({off + 0.5}\\) is refused: a penalty makes"):
            refuse_penalties("test", {name: off + 0.5})
