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
    """Sharper too. vLLM's own experts need widths that 32 divides."""
    return random_model(tmp_path_factory.mktemp("moe"), EXPERTS | {"moe_intermediate_size": 64}, sharper=3.0)
