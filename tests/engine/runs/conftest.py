"""Runs that ended early, and scores with a planted fault."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from zerokl.engine.train.parallel.scorer import WorkersSampler

from tests.engine.runs.exact_runs import forget_end


@pytest.fixture
def cut(run, base, tmp_path) -> Path:
    """The module's `run`, as if it had ended after its second step of three.

    A copy of its model, the module's `base`, lies in tmp_path / "model".
    """
    shutil.copytree(base, tmp_path / "model")
    path = shutil.copytree(run, tmp_path / "run")
    forget_end(path)
    return path


@pytest.fixture
def plant_score(monkeypatch) -> Callable[[int], None]:
    """plant_score(i): the first score of the i-th given sequence is one bit off."""
    score = WorkersSampler.score

    def plant(i: int) -> None:
        def one_bit_off(self, rollouts, sampling_params):
            scores = score(self, rollouts, sampling_params)
            scores[i].view(np.int32)[0] ^= 1
            return scores

        monkeypatch.setattr(WorkersSampler, "score", one_bit_off)

    return plant
