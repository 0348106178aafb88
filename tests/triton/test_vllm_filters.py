"""Filters beside those of vLLM's second runner (v1/worker/gpu/sample), whose Triton kernels are interpreted.

tests/vllm/test_filters.py has the sampler of the first runner.
"""

import pytest
import torch
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.truncation import scaled_logits

from tests.helpers import randint, randn, total_unequal

V, ROWS = 1500, 6
BIAS, ALLOWED = {3: 2.5, 700: -1.5, 1022: 4.0}, range(0, 1024, 2)
PARAMS = {
    "min-p": SamplingParams(1.0, 0, 1.0, 0.05),
    "min-p at a temperature": SamplingParams(0.7, 0, 1.0, 0.05),
    "bias": SamplingParams.of(1.3, logit_bias=BIAS),
    "allowed": SamplingParams.of(1.3, allowed_token_ids=ALLOWED),
    "all": SamplingParams.of(1.3, 40, 0.95, 0.02, BIAS, ALLOWED),
    "greedy": SamplingParams.of(0.0, 0, 1.0, 0.0, BIAS, ALLOWED),
}


def filtered_by_vllm(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The kernels of Sampler.apply_sampling_params in v1/worker/gpu/sample/sampler.py, in its order."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
    from vllm.v1.worker.gpu.sample.logit_bias import apply_logit_bias
    from vllm.v1.worker.gpu.sample.min_p import apply_min_p

    z, n = logits.clone(), len(logits)
    request = torch.zeros(n, dtype=torch.int32)  # every row is of one request
    bias, allowed = dict(params.logit_bias), params.allowed_token_ids or ()

    def row(values: list, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor([values or [0]], dtype=dtype)

    def count(number: int) -> torch.Tensor:
        return torch.tensor([number], dtype=torch.int32)

    apply_logit_bias(
        z,
        request,
        torch.zeros(n, dtype=torch.int64),
        count(len(allowed)),
        row(list(allowed)),
        count(len(bias)),
        row(list(bias)),
        row(list(bias.values()), torch.float32),
        count(0),
        count(0),
        count(0),
        row([]),
    )
    apply_temperature(z, request, torch.tensor([params.temperature]))
    apply_min_p(z, request, torch.tensor([params.min_p]))
    k = torch.full((n,), params.top_k) if params.top_k else None
    p = torch.full((n,), params.top_p) if params.top_p < 1.0 else None
    return apply_top_k_top_p_pytorch(z, k, p, allow_cpu_sync=True)


def unequal(params: SamplingParams, ours: SamplingParams) -> int:
    logits = randn(7, ROWS, V, scale=2.0)
    logits[torch.arange(ROWS), randint(8, V, ROWS)] = 6.0
    return total_unequal([scaled_logits(logits, ours)], [filtered_by_vllm(logits, params)])


@pytest.mark.parametrize("name", PARAMS)
def test_filtered_logits_have_the_bits_of_vllms_second_runner(batch_invariant, name):
    assert unequal(PARAMS[name], PARAMS[name]) == 0


@pytest.mark.parametrize(
    "left_out", [{"min_p": 0.0}, {"logit_bias": ()}, {"allowed_token_ids": None}], ids=str
)
def test_control_a_filter_that_is_left_out_is_found(batch_invariant, left_out):
    params = SamplingParams.of(1.3, 0, 1.0, 0.02, BIAS, ALLOWED)
    assert unequal(params, params) == 0
    assert unequal(params, params._replace(**left_out)) > 0
