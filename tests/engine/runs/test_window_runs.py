"""Runs of models with windows and soft caps: a side that attends or scores otherwise stops the run."""

from pathlib import Path

import pytest
import torch
from zerokl.engine.runs.run import train
from zerokl.engine.train.monitor import MismatchError
from zerokl.kernels import logprob
from zerokl.kernels.attention_rule import AttentionRule
from zerokl.model.blocks.attention import Attention
from zerokl.model.families import MODEL_TYPES

from tests.engine.runs.exact_runs import train_exactly
from tests.helpers import fingerprint
from tests.random_model import TWO_LAYERS, random_model

ONE_STEP = {"steps": 1, "dtype": "float32"}
RULE, CAP = Attention._rule, logprob.softcap


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory) -> Path:
    widths = TWO_LAYERS | {"model_type": "gemma2"} | dict(MODEL_TYPES["gemma2"].small) | {"sliding_window": 4}
    return random_model(tmp_path_factory.mktemp("gemma2"), widths, 1.5)


def test_a_run_is_exact_and_guesses_change_no_bit(config, gemma2, tmp_path):
    for name, more in (("plain", {}), ("guesses", {"native__speculate": 4, "native__max_batch_tokens": 5})):
        train_exactly(config(model=gemma2, **ONE_STEP, **more), tmp_path / name)
    assert fingerprint(tmp_path / "guesses") == fingerprint(tmp_path / "plain")


def test_a_run_with_chunks_of_keys_is_exact(config, gemma2, tmp_path):
    chunks = config(model=gemma2, **ONE_STEP, precision__attention="chunked-512")
    assert train(chunks, tmp_path / "run").mismatch_max_abs == 0.0


@pytest.mark.parametrize(
    "fault",
    [
        "a window one key longer",
        pytest.param("a window one key shorter", marks=pytest.mark.full),
        "no cap of scores",
    ],
)
@pytest.mark.parametrize("side", [True, False], ids=["trainer", "sampler"])
def test_control_another_attention_on_one_side_stops_the_run(
    config, gemma2, tmp_path, monkeypatch, fault, side
):
    def otherwise(self: Attention, order: AttentionRule) -> AttentionRule:
        rule = RULE(self, order)
        if torch.is_grad_enabled() != side:
            return rule
        if fault == "no cap of scores":
            return rule._replace(cap=0.0)
        by = 1 if fault.endswith("longer") else -1
        return rule._replace(window=rule.window + by) if rule.window else rule

    monkeypatch.setattr(Attention, "_rule", otherwise)
    with pytest.raises(MismatchError):
        train(config(model=gemma2, **ONE_STEP), tmp_path / "run")


@pytest.mark.parametrize("side", [True, False], ids=["trainer", "sampler"])
def test_control_logits_that_one_side_does_not_cap_stop_the_run(config, gemma2, tmp_path, monkeypatch, side):
    def otherwise(x: torch.Tensor, cap: float) -> torch.Tensor:
        return x if training[-1] == side else CAP(x, cap)

    training, forward = [False], logprob._LinearLogprob.forward

    def scored(*args):
        training.append(True)
        try:
            return forward(*args)
        finally:
            training.pop()

    monkeypatch.setattr(logprob._LinearLogprob, "forward", staticmethod(scored))
    monkeypatch.setattr(logprob, "softcap", otherwise)
    with pytest.raises(MismatchError):
        train(config(model=gemma2, **ONE_STEP), tmp_path / "run")
