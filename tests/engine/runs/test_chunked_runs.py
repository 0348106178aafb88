"""Runs with attention in chunks of 512 keys, of contexts that have several: exact, guessed and resumed."""

import pytest
import torch
from zerokl.engine.runs.run import resume, train
from zerokl.engine.train.monitor import MismatchError
from zerokl.kernels.attention_rule import AttentionRule
from zerokl.model.blocks.attention import Attention

from tests.engine.runs.test_resume import _interrupted
from tests.random_model import of_long_prompts

RULE = Attention._rule


@pytest.fixture(scope="module", params=[pytest.param("float32", marks=pytest.mark.full), "bfloat16"])
def settings(request, model, tmp_path_factory):
    words = of_long_prompts(model, tmp_path_factory.mktemp("prompts"))
    words |= {"precision.attention": "chunked-512", "dtype": request.param, "checkpoint.every": 1}
    return words | {"num_generations": 2, "steps": 2}


@pytest.fixture(scope="module")
def whole(config, settings, tmp_path_factory):
    return train(config(**settings), tmp_path_factory.mktemp("whole") / "run")


def test_a_run_is_exact_and_has_one_ledger_guessed_and_resumed(config, settings, whole, tmp_path):
    assert (whole.tokens_unequal, whole.mismatch_max_abs) == (0, 0.0)
    guessed = config(**settings, native__speculate=3, native__max_batch_tokens=200)
    assert train(guessed, tmp_path / "guessed").fingerprint == whole.fingerprint
    _interrupted(config(**settings), tmp_path / "cut", 1)
    assert resume(tmp_path / "cut").fingerprint == whole.fingerprint


def test_control_the_contexts_have_several_chunks(config, settings, whole, tmp_path):
    walk = train(config(**settings | {"precision.attention": "vllm"}), tmp_path / "walk")
    assert walk.mismatch_max_abs == 0.0
    assert walk.weights != whole.weights


def test_control_a_trainer_with_other_chunks_stops_the_run(config, settings, tmp_path, monkeypatch):
    """In fp32: two layers in bf16 hide the last bits."""

    def otherwise(self: Attention, order: AttentionRule) -> AttentionRule:
        return RULE(self, order)._replace(chunk=256 if torch.is_grad_enabled() else 512)

    monkeypatch.setattr(Attention, "_rule", otherwise)
    with pytest.raises(MismatchError):
        train(config(**settings | {"dtype": "float32"}), tmp_path / "run")
