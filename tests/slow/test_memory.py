"""Peak memory: under 2 GiB for a step of the demo, and bounded by the micro-batch, not by the batch."""

import json
import os
import subprocess
import sys

import pytest
from zerokl.verify.ledger import LEDGER

from tests.helpers import torchrun, write_letters_reward
from tests.random_model import random_model

pytestmark = pytest.mark.slow
_RUN = """
import resource, sys
from pathlib import Path
from zerokl.engine.config_file import load_config
from zerokl.engine.runs.init import random_decoder
from zerokl.engine.runs.run import train
from zerokl.engine.tasks.tokenizer import character_tokenizer
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
    write_letters_reward(tmp_path)

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
    long = dict(sampling__max_tokens=200, virtual_shards=1, workers=1, task__reward="letters_reward:reward")
    small, large = peak_gib(prompts=8, micro_batch=4, **long), peak_gib(prompts=48, micro_batch=4, **long)
    unbounded = peak_gib(prompts=8, micro_batch=64, **long)
    assert large - small < 0.25 * (unbounded - small), (small, large, unbounded)


_PEAK = """
import atexit, os
def peak():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    with open(f"peak-{os.environ.get('RANK', '0')}", "w") as out:
        out.write(line.split()[1])
if "-m" in __import__("sys").orig_argv:  # a rank, not one of its workers
    atexit.register(peak)
from letters_reward import reward
"""


def test_ranks_share_the_memory_of_the_training_state(tmp_path):
    """47 million bf16 weights, of which ranks own parts, down to parts of a weight: one ledger, and of master
    weights, moments and sums of the gradient a rank of four holds 5 bytes a weight, a single process 24.
    """
    widths = dict(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
    )
    model = random_model(tmp_path, widths)
    write_letters_reward(tmp_path)
    (tmp_path / "peak.py").write_text(_PEAK)
    words = {
        "model": model,
        "steps": 1,
        "prompts": 8,
        "num_generations": 2,
        "evaluation.every": 0,
        "workers": 1,
        "dtype": "bfloat16",
        "task.reward": "peak:reward",
    }
    overrides = [word for key, value in words.items() for word in (f"--{key}", str(value))]
    peaks = {}
    for size in (1, 4):
        train = torchrun(
            size, "-m", "zerokl", "train", "--preset", "demo", "--run-dir", f"run{size}", *overrides
        )
        environment = os.environ | {"PYTHONPATH": "."}
        done = subprocess.run(train, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:]
        peaks[size] = [int((tmp_path / f"peak-{rank}").read_text()) / 2**20 for rank in range(size)]
    ledgers = [
        [
            line
            for line in map(json.loads, (tmp_path / f"run{size}" / LEDGER).open())
            if line["kind"] == "step"
        ]
        for size in (1, 4)
    ]
    assert ledgers[0] == ledgers[1] != []
    assert max(peaks[4][1:]) < 0.65 * peaks[1][0], (
        peaks
    )  # the first rank writes the checkpoint, which passes through its memory
