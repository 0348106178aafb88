"""The model of random weights, the task and the short runs of tests/engine; and a sampler with a fault."""

import pytest
from zerokl.audit.engines.engine import ZeroklEngine
from zerokl.audit.knobs import column

from tests.engine.conftest import _threads, _toy_module, config, decoder, model, read_jsonl, sampler

__all__ = ["_threads", "_toy_module", "config", "decoder", "model", "read_jsonl", "sampler"]


@pytest.fixture
def without_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No number at an operation is tried on a log that no hypothesis explains, which takes seconds."""
    monkeypatch.setattr(column, "_MOST_WEIGHTS", 0)


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
