"""The random tiny Qwen3 of `zerokl init`'s preset."""

from pathlib import Path

import pytest
from zerokl.engine.runs.init import PRESETS

from tests.random_model import random_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Sharper than at initialisation, so that tokens depend on their context.
    return random_model(tmp_path_factory.mktemp("model"), PRESETS["tiny"], sharper=3.0)
