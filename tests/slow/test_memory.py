"""Peak memory: under 2 GiB for a step of the demo, and bounded by the micro-batch, not by the batch."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
_RUN = """
import resource, sys
from pathlib import Path
from zerokl.engine.config import load_config
from zerokl.engine.initialise import random_decoder
from zerokl.engine.run import train
from zerokl.engine.text import character_tokenizer
from zerokl.model.checkpoint import write_checkpoint
folder = Path(sys.argv[1])
if not (folder / "model").exists():
    decoder = random_decoder("tiny", 64, 0)
    character_tokenizer().save_pretrained(folder / "tokenizer")
    write_checkpoint(folder / "model", decoder.layout, decoder.flat.detach(), companions=folder / "tokenizer")
words = dict(word.split("=") for word in sys.argv[3:]) | {"model": str(folder / "model"), "steps": "2", "evaluation.every": "0"}
train(load_config(None, "demo", words), sys.argv[2])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


@pytest.fixture
def peak_gib(tmp_path):
    """Peak memory in GiB of two steps with these overrides, in a process of its own."""
    runs = iter(range(100))
    (tmp_path / "length_reward.py").write_text("def reward(problem, completion):\n    return float(sum(map(ord, completion)) % 97)\n")

    def run(**overrides) -> float:
        words = [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()]
        command = [sys.executable, "-c", _RUN, str(tmp_path), str(tmp_path / f"run{next(runs)}"), *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
        return float(done.stdout.splitlines()[-1])

    return run


def test_a_step_of_the_demo_stays_under_2_gib(peak_gib):
    assert peak_gib() < 2.0


def test_memory_is_bounded_by_the_micro_batch_not_by_the_batch(peak_gib):
    # A reward that differs between samples, so that every micro-batch has a backward pass to hold memory for.
    long = dict(sampling__max_tokens=200, virtual_shards=1, workers=1, task__reward="length_reward:reward")
    small, large = peak_gib(prompts=8, micro_batch=4, **long), peak_gib(prompts=48, micro_batch=4, **long)
    unbounded = peak_gib(prompts=8, micro_batch=64, **long)
    assert large - small < 0.25 * (unbounded - small), (small, large, unbounded)
