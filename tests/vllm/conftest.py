"""The random tiny Qwen3 of `zerokl init`'s preset, and a smaller Qwen3-MoE."""

from pathlib import Path

import pytest
from zerokl.engine.runs.init import PRESETS

from tests.random_model import EXPERTS, random_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Sharper than at initialisation, so that tokens depend on their context.
    return random_model(tmp_path_factory.mktemp("model"), PRESETS["tiny"], sharper=3.0)


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sharper too, with heads that vLLM's own attention takes."""
    return random_model(tmp_path_factory.mktemp("moe"), EXPERTS | {"head_dim": 32}, sharper=3.0)
