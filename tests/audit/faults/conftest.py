"""The world that faults are planted in."""

import os

import pytest
import torch
from filelock import FileLock
from zerokl.benchmarks.audit_cases import models

STEPS = 80  # of training: enough that a token's context matters


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A small Qwen3 and the same some steps earlier, in fp32 on both sides; one worker trains it for all."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "worlds"
    root.mkdir(exist_ok=True)
    with FileLock(root / "lock"):
        return models.world("qwen3", 0, root, STEPS, torch.float32)
