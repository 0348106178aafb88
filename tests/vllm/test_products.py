"""Products of features that vLLM draws: rows of tests/engine/test_products.py, run and read again."""

from random import Random

import pytest
from zerokl.engine.runs.run import train

from tests.engine.conftest import _toy_module, config
from tests.engine.test_products import _turns_and_actors, make, random_row, run_rows

pytestmark = pytest.mark.vllm

__all__ = ["_toy_module", "_turns_and_actors", "config", "make"]


@pytest.mark.parametrize("sampler", ["vllm-zerokl", pytest.param("vllm", marks=pytest.mark.full)])
def test_rows_of_random_settings_are_run_and_read_again(make, tmp_path, capsys, sampler):
    row = random_row(make, {"sampler": sampler}, Random(0), kept=lambda row: True)
    run_rows([row], make, tmp_path, capsys)


def test_weights_of_experts_are_refused_where_vllm_takes_no_new_ones(make, tmp_path):
    row = {"sampler": "vllm", "model": "experts", "exact": False}
    with pytest.raises(ValueError, match="does not take new weights of a mixture of experts") as refusal:
        train(make(row), tmp_path / "run")
    assert len(str(refusal.value).splitlines()) == 1
