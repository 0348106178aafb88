"""The model of random weights, the task and the short runs of tests/engine; and a sampler with a fault."""

import pytest
from zerokl.audit.engines.engine import ZeroklEngine

from tests.engine.conftest import (
    _forked_workers,
    _threads,
    _toy_module,
    config,
    decoder,
    model,
    read_jsonl,
    sampler,
    without_knobs,
)

__all__ = [
    "_forked_workers",
    "_threads",
    "_toy_module",
    "config",
    "decoder",
    "model",
    "read_jsonl",
    "sampler",
    "without_knobs",
]


@pytest.fixture
def crowded_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native sampler gives the fourth of eight or more greedy requests another last logprob."""
    plain = ZeroklEngine.generate

    def crowded(self, prompts, generation_params, seed):
        rollouts = plain(self, prompts, generation_params, seed)
        if len(prompts) >= 8 and generation_params.sampling_params.temperature == 0.0:
            rollouts[3].logprobs[-1] += 0.25
        return rollouts

    monkeypatch.setattr(ZeroklEngine, "generate", crowded)
