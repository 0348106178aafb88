"""Our draw inside vLLM: nothing waits for the device, and what is no distribution is refused on the host."""

import json
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from zerokl.benchmarks.budget import HostWork
from zerokl.engine.rollout.types import DrawParams, Request, RngKey, Uniforms
from zerokl.kernels.launch import recorded_launches
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.tiles import tiles_of_target

from tests.helpers import randn, total_unequal
from tests.triton.vllm_kernels import batch_invariant_module

# vLLM keeps a placeholder of Triton for good, unless it is imported in this way first.
batch_invariant_module()
vllm = import_module("vllm")
draw = import_module("zerokl.engine.rollout.vllm.draw")
vllm_sampler = import_module("zerokl.engine.rollout.vllm.sampler")

HOT, COLD = SamplingParams(1.3), SamplingParams(0.7, 10, 0.9)
FILTERED = SamplingParams.of(1.1, 20, 0.95, 0.02, {3: 2.5, 7: -1.5}, range(0, 300, 3))


def drawing_of(sampling_params: list[SamplingParams]) -> draw.KeyedDraw:
    drawing = draw.KeyedDraw(None, torch.device("cpu"), False)
    drawing._rows = {
        i: draw.Row(params, key, 0, Uniforms(key), [], 0.0)
        for i, params in enumerate(sampling_params)
        for key in [RngKey(7, 0, prompt=i)]
    }
    return drawing


def host_work(sampling_params: list[SamplingParams]) -> HostWork:
    logits = torch.empty(len(sampling_params), 4096, device="meta")
    with tiles_of_target("sm_90"), recorded_launches(), HostWork() as host:
        drawing_of(sampling_params).apply(logits)
    return host


@pytest.mark.parametrize(
    "sampling_params", [[HOT] * 4, [COLD] * 4, [FILTERED] * 4, [HOT, COLD, FILTERED, COLD]]
)
def test_a_draw_waits_for_nothing(sampling_params):
    counts = host_work(sampling_params).counts
    kinds = len(set(sampling_params))
    assert (counts["waits"], counts["uploads"]) == (0, kinds)


def test_control_a_draw_that_looks_at_its_logprobs_waits(monkeypatch):
    def looks(logits: torch.Tensor) -> torch.Tensor:
        return apply(logits) if logits.cpu() is not None else logits

    drawing = drawing_of([HOT])
    apply = drawing.apply
    with tiles_of_target("sm_90"), recorded_launches(), HostWork() as host:
        looks(torch.empty(1, 4096, device="meta"))
    assert host.counts["waits"] == 1


def test_rows_of_several_kinds_have_the_draws_of_each_kind_alone():
    logits = randn(0, 4, 300, scale=3.0)
    kinds = [HOT, COLD, FILTERED, COLD]
    mixed = drawing_of(kinds).apply(logits.clone())
    alone = [drawing_of([params] * 4).apply(logits.clone())[i] for i, params in enumerate(kinds)]
    assert total_unequal([mixed], [torch.stack(alone)]) == 0
    assert int(mixed[2].argmax()) in FILTERED.allowed_token_ids
    assert (mixed.isfinite().sum(dim=1) == 1).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_p": 0.1}, "min_p .* KeyedDraw applies filters itself"),
        ({"logit_bias": {3: 1.0}}, "logit_bias .* KeyedDraw applies filters itself"),
        ({"allowed_token_ids": [3]}, "allowed_token_ids .* KeyedDraw applies filters itself"),
        ({"repetition_penalty": 1.1}, "repetition_penalty .* is refused: a penalty makes"),
        ({"presence_penalty": 0.5}, "presence_penalty .* is refused"),
        ({"frequency_penalty": 0.5}, "frequency_penalty .* is refused"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_filter_of_vllms_own_is_refused_beside_our_draw(options, message):
    request = Request((1,), RngKey(0, 0), DrawParams(FILTERED, frozenset()), 3)
    arguments = draw.request_arguments(request, 0)
    draw.KeyedDraw.validate_params(vllm.SamplingParams(extra_args=arguments))
    if "min_p" in options:
        options = options | {"temperature": 1.0}  # a greedy request of vLLM's has none
    with pytest.raises(ValueError, match=message):
        draw.KeyedDraw.validate_params(vllm.SamplingParams(**options, extra_args=arguments))


def test_the_parameters_of_a_request_come_back_from_plain_numbers():
    """They cross process boundaries as lists."""
    request = Request((1,), RngKey(0, 0), DrawParams(FILTERED, frozenset()), 3)
    arguments = json.loads(json.dumps(draw.request_arguments(request, 0)))
    drawing = draw.KeyedDraw(None, torch.device("cpu"), False)
    drawing.update_state(
        SimpleNamespace(
            removed=[], moved=[], added=[(0, vllm.SamplingParams(extra_args=arguments), None, [])]
        )
    )
    assert drawing._rows[0].sampling_params == FILTERED


def _output(logprobs: list[float]) -> Any:
    completion = SimpleNamespace(
        token_ids=[3, 4, 5],
        logprobs=[{t: SimpleNamespace(logprob=x)} for t, x in zip([3, 4, 5], logprobs, strict=True)],
        finish_reason="length",
        weight_versions=[SimpleNamespace(version="0")],
    )
    return SimpleNamespace(outputs=[completion])


def test_logits_that_are_no_distribution_are_refused_when_the_completion_is_read():
    logits = randn(0, 2, 300)
    logits[1] = float("nan")
    processed = drawing_of([HOT] * 2).apply(logits)
    assert processed[0].isfinite().sum() == 1
    assert processed[1].isnan().sum() == 1
    request = Request((1,), RngKey(0, 0, prompt=2, sample=1), DrawParams(HOT, frozenset()), 3, drawn=4)
    sampler = SimpleNamespace(version=0, _guesses=False)
    assert vllm_sampler.KeyedSampler._completion(sampler, request, _output([-1.0, -2.0, -3.0])).ids == (
        3,
        4,
        5,
    )
    with pytest.raises(FloatingPointError, match="prompt 2, sample 1, position 5 are not finite"):
        vllm_sampler.KeyedSampler._completion(sampler, request, _output([-1.0, float("nan"), -3.0]))
