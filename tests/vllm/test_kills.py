"""A run that samples with vLLM, killed at random moments, ends with the ledger of the native sampler."""

import pytest
from zerokl.engine.config.config_file import load_config
from zerokl.engine.config.run_config import Config

from tests.engine.runs.test_kills import check_kills

pytestmark = [pytest.mark.vllm, pytest.mark.proof]


def test_thirty_kills(model, tmp_path):
    base = {
        "model": str(model),
        "sampling.max_tokens": "8",
        "optimizer.lr": "1e-2",
        "task.name": "add",
        "task.options": {"max_value": 9, "train": 20, "held_out": 10},
    }

    def config(**overrides: object) -> Config:
        return load_config(None, None, base | {k.replace("__", "."): v for k, v in overrides.items()})

    check_kills(config, tmp_path, 30, 3, sampler="vllm-zerokl")
