"""The model of random weights, the task and the short runs of tests/engine."""

from tests.engine.conftest import _threads, _toy_module, config, decoder, model, read_jsonl, sampler

__all__ = ["_threads", "_toy_module", "config", "decoder", "model", "read_jsonl", "sampler"]
