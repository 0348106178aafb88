"""logprob's Triton kernels, interpreted: vLLM's bits, one result for sampler and trainer, and the draw."""

import pytest
import torch
from zerokl.kernels import logprob, logprob_triton
from zerokl.kernels.draw import draw
from zerokl.kernels.logprob import linear_logprob, log_distribution, token_logprobs
from zerokl.kernels.logprob_triton import logprob_bwd, logprob_fwd, prefix_sums
from zerokl.kernels.matmul import matmul
from zerokl.kernels.philox import Stream, uniform_range
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.truncation import scaled_logits

from tests.helpers import DTYPES, assert_at_most_twice_the_error, randint, randn, total_unequal
from tests.law import gradients

# Every filter; of the V tokens of the tests below, at least 1024.
FILTERED = SamplingParams.of(1.3, 20, 0.95, 0.02, {3: 2.5, 700: -1.5, 1022: 4.0}, range(0, 1024, 2))
SAMPLING_PARAMS = (
    SamplingParams(),
    SamplingParams(0.7),
    SamplingParams(0.0),
    SamplingParams(1.3, 20),
    SamplingParams(1.0, 0, 0.8),
    SamplingParams(0.9, 50, 0.9),
    SamplingParams(0.9, 0, 1.0, 0.05),
    FILTERED,
)


def rows(V: int, n: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, V], and the id of a token for each row.

    In every second row the token is the likely one. Its logprob is the log of a sum near 1, which shows the
    last bit of the sum.
    """
    z, ids = randn(V, n, V), randint(V + 1, V, n)
    z[::2] -= 12.0
    z[torch.arange(0, n, 2), ids[::2]] = 0.0
    return z, ids


@pytest.mark.parametrize("V", [1, 7, 1000, 1024, 2500, 4096])
def test_logprob_has_vllms_bits(batch_invariant, V):
    z, ids = rows(V)
    expected = batch_invariant.log_softmax(z).gather(1, ids.unsqueeze(1)).squeeze(1)
    assert total_unequal([token_logprobs(z, ids)[0]], [expected]) == 0
    assert total_unequal([token_logprobs(z[2:3], ids[2:3])[0]], [expected[2:3]]) == 0


@pytest.mark.parametrize("params", [SamplingParams(0.7), SamplingParams(1.3, 20), FILTERED])
def test_the_log_distribution_has_the_logprobs_bits(params):
    z = scaled_logits(randn(5, 6, 1500), params)
    table = log_distribution(z)
    for token in (0, 1, 700, 1024, 1499):
        ids = torch.full((6,), token)
        assert total_unequal([table[:, token]], [token_logprobs(z, ids)[0]]) == 0


@pytest.mark.parametrize("V", [7, 1024, 2500])
def test_logprob_has_the_bits_of_vllms_second_runner(batch_invariant, V):
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    z, ids = rows(V)
    expected = compute_token_logprobs(z, ids.unsqueeze(1)).squeeze(1)
    assert total_unequal([token_logprobs(z, ids)[0]], [expected]) == 0


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.7])
def test_temperature_divides_first_and_then_logprob_has_vllms_bits(batch_invariant, temperature):
    z, ids = rows(2500)
    expected = (
        batch_invariant.log_softmax(z / torch.tensor(temperature)).gather(1, ids.unsqueeze(1)).squeeze(1)
    )
    assert total_unequal([logprob_fwd(z, ids, temperature)[0]], [expected]) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("V", [1, 1000, 2500, 9000])
def test_16_bit_logits_have_the_bits_of_the_same_numbers_in_fp32(V, temperature, dtype):
    z, ids = rows(V)
    z = z.to(dtype)
    narrow, wide = logprob_fwd(z, ids, temperature), logprob_fwd(z.float(), ids, temperature)
    assert total_unequal(narrow, wide) == 0


def test_control_another_tile_of_16_bit_logits_has_other_bits(monkeypatch):
    z, ids = rows(9000, 20)
    wide = logprob_fwd(z.bfloat16().float(), ids)
    monkeypatch.setattr(logprob_triton, "TILE", 2048)
    assert total_unequal(logprob_fwd(z.bfloat16(), ids), wide) > 0


def test_control_another_tile_has_other_bits(batch_invariant, monkeypatch):
    z, ids = rows(5000, 20)
    expected = batch_invariant.log_softmax(z).gather(1, ids.unsqueeze(1)).squeeze(1)
    monkeypatch.setattr(logprob_triton, "TILE", 2048)
    assert total_unequal([token_logprobs(z, ids)[0]], [expected]) > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sampling_params", SAMPLING_PARAMS, ids=lambda d: f"{d.temperature}-{d.top_k}-{d.top_p}-{d.min_p}"
)
def test_sampler_and_trainer_have_the_same_bits(sampling_params, dtype):
    h, w, ids = randn(0, 9, 32, dtype=dtype), randn(1, 1500, 32, dtype=dtype), randint(2, 1500, 9)
    z = scaled_logits(matmul(h, w), sampling_params)
    u = torch.from_numpy(uniform_range(9, 3, Stream.SAMPLE))
    drawn = draw(z, u, greedy=sampling_params.temperature == 0.0)
    for tokens in (ids, drawn):
        trainer = linear_logprob(h.requires_grad_(), w, tokens, sampling_params)
        assert total_unequal(token_logprobs(z, tokens), [x.detach() for x in trainer]) == 0
    assert torch.isfinite(token_logprobs(z, drawn)[0]).all()


def test_control_a_product_with_the_reciprocal_temperature_has_other_bits():
    z, ids = rows(2500, 20)
    ours, product = logprob_fwd(z, ids, 0.7)[0], logprob_fwd(z * (1.0 / 0.7), ids)[0]
    assert total_unequal([ours], [product]) > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_takes_the_place_of_the_logits(dtype):
    logits, ids, dlogp = randn(0, 5, 5000, dtype=dtype, scale=4.0), randint(1, 5000, 5), randn(2, 5)
    _, _, *stats = logprob_fwd(logits.float(), ids, 0.7)

    def autograd(z: torch.Tensor) -> torch.Tensor:
        leaf = z.detach().requires_grad_()
        logp = torch.log_softmax(leaf / 0.7, 1).gather(1, ids.unsqueeze(1)).squeeze(1)
        return torch.autograd.grad(logp, leaf, dlogp.to(z.dtype))[0]

    plain, exact = autograd(logits.float()).to(dtype), autograd(logits.double())
    out_of_place = torch.empty_like(logits)
    logprob_bwd(logits, ids, dlogp, *stats, out_of_place, 0.7, 0.7)
    logprob_bwd(logits, ids, dlogp, *stats, logits, 0.7, 0.7)
    assert total_unequal([logits], [out_of_place]) == 0
    assert_at_most_twice_the_error(logits, plain, exact, "dlogits")


def test_rows_held_at_once_decide_no_bit(monkeypatch):
    op, lengths = gradients.OPS["linear_logprob"], [100, 3, 150]
    for dtype in (torch.float32, torch.bfloat16):
        before = gradients.summed_grads(op, dtype, 64, lengths, [[0, 1, 2]])
        with monkeypatch.context() as patch:
            patch.setattr(logprob, "CHUNK_BYTES", 1)
            after = gradients.summed_grads(op, dtype, 64, lengths, [[0, 1, 2]])
        assert total_unequal(before, after) == 0


def test_prefix_sums_are_exact_and_a_rows_own():
    e = torch.exp(-randn(0, 4, 3000).abs() * 10)
    e[1, 100:200] = 0.0
    sums = prefix_sums(e)
    units = 2.0**50
    for row, exact in zip(e, sums, strict=True):
        total, expected = 0, []
        for x in row.tolist():
            total += int(x * units)
            expected.append(float(total))
        assert exact.tolist() == expected
    assert (sums[1, 99:200] == sums[1, 99]).all()
    assert total_unequal([prefix_sums(e[2:3])], [sums[2:3]]) == 0
    # control: fp64 sums do depend on the split
    halves = torch.cumsum(e.double(), 1)[:, 1499:1500] + torch.cumsum(e[:, 1500:].double(), 1)
    assert total_unequal([halves], [torch.cumsum(e.double(), 1)[:, 1500:]]) > 0


def test_draw_inverts_the_distribution_function():
    z = randn(0, 1, 2000, scale=3.0).expand(500, -1).contiguous()
    z[:, ::3] = float("-inf")
    u = torch.from_numpy(uniform_range(500, 5, Stream.SAMPLE))
    u[0], u[1] = 0.0, 1.0 - 2.0**-53
    ids = draw(z, u)
    p = torch.softmax(z[0].double(), 0)
    upper = torch.cumsum(p, 0)
    assert (p[ids] > 0).all()
    assert (upper[ids] >= u - 1e-9).all()
    assert (upper[ids] - p[ids] <= u + 1e-9).all()
    alone = torch.cat([draw(z[i : i + 1], u[i : i + 1]) for i in range(50)])
    assert total_unequal([alone], [ids[:50]]) == 0
    assert total_unequal([ids], [draw(z, u.flip(0))]) > 0
