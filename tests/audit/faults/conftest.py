"""The world that faults are planted in."""

import pytest
import torch
from zerokl.benchmarks.audit_cases import models

STEPS = 80  # of training: enough that a token's context matters


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A small Qwen3 and the same some steps earlier, in fp32 on both sides."""
    root = tmp_path_factory.mktemp("worlds")
    return models.world("qwen3", 0, root, STEPS, torch.float32)
