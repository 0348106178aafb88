"""The part of benchmarks/device.sh that needs TRL, with toy sizes on a CPU."""

import re

import pytest

from tests.benchmarks.test_device import SMALL, run_device

pytestmark = pytest.mark.trl


def test_a_step_runs_beside_trls():
    process = run_device("step", *SMALL)
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-4000:]
    row = (
        r"^whole step of 2 x 4 x 8 tokens after 8, TRL with transformers' generate +step_s [0-9.]+  sample_s "
    )
    assert re.search(row, process.stdout, re.M)
    assert re.search(r"^whole step: zerokl's native sampler over TRL +ratio ", process.stdout, re.M)
