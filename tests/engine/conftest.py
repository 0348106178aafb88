"""A model of 80,000 random weights, a task with a reward that the model can earn, and short runs of both."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# A thread that waits at a barrier spins until the other thread is scheduled. With two threads on one busy
# core a run then takes 28 s instead of 0.5 s. The variable is read when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from zerokl.engine.config.config_file import load_config
from zerokl.engine.config.run_config import Config
from zerokl.engine.rollout.native import NativeSampler
from zerokl.model.checkpoint import load_decoder
from zerokl.model.decoder import Decoder

from tests.forked import forked_workers
from tests.helpers import importable
from tests.random_model import TWO_LAYERS, random_model

# A model of random weights never adds up two numbers. It does write letters and digits, so with a reward for
# letters some samples of a group are better than others.
TOY = '''
def letters(problem, completion):
    """Number of letters divided by 8, the most characters of a completion."""
    return sum(c.isalpha() for c in completion) / 8


def odd(problem, completion):
    """1 for every other text."""
    return float(sum(map(ord, completion)) % 2)


odd.binary = True


def as_many_letters(a, b):
    """Whether two completions mean the same."""
    return letters(None, a) == letters(None, b)


def no_meaning(a, b):
    raise KeyError("missing")


def constant(problem, completion):
    """Nothing can be learned from it: all samples are equally good."""
    return 0.1


class Strict:
    """A reward that says 0 or 1 and does not keep to it, and takes answers of digits."""

    binary = True

    def __call__(self, problem, completion):
        return 0.5

    def check(self, problem):
        if not problem.answer[0].isdigit():
            raise ValueError(f"{problem.answer} is no answer")


strict = Strict()


def nothing(problem, completion):
    return float("nan")


def broken(problem, completion):
    raise RuntimeError("two\\nlines")


def ppo(r, A, logp, low, high):
    """PPO's clip, as a surrogate that a user wrote."""
    from zerokl.engine.train.losses.surrogates import clip

    return clip(r, A, logp, low, high)


def alone(r, A, logp, low, high):
    """A value without a slope."""
    return r * A


def raises(r, A, logp, low, high):
    raise KeyError("missing")


def nan(r, A, logp, low, high):
    return r * A, r * A * float("nan")


def wrong(r, A, logp, low, high):
    """The slope lacks the ratio."""
    return r * A, A


def half(r, A, logp, low, high):
    """Returns values for too few tokens."""
    return r[1:] * A[1:], r * A


class Digits:
    """A task that a user wrote."""

    chat = False

    def __init__(self, n=5, held_out=0):
        from zerokl.engine.tasks.base import Problem

        self.splits = {"train": [Problem(i, f"{i}=", str(i)) for i in range(n)], "held_out": []}

    def problems(self, split):
        return self.splits[split]

    def reward(self, problem, completion):
        return float(completion == problem.answer)


class Riddles(Digits):
    """A task whose answers earn nothing."""

    def reward(self, problem, completion):
        return 0.0
'''


@pytest.fixture(scope="session", autouse=True)
def _toy_module(tmp_path_factory: pytest.TempPathFactory):
    with importable(tmp_path_factory.mktemp("modules"), "toy", TOY):
        yield


@pytest.fixture
def marked(monkeypatch, tmp_path) -> Callable[[], set[int]]:
    """marked(): all processes that the test has started, whoever their parents are now."""
    monkeypatch.setenv("ZEROKL_TEST_MARK", str(tmp_path))

    def processes() -> set[int]:
        mark, pids = f"ZEROKL_TEST_MARK={tmp_path}\0".encode(), set()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (folder / "environ").read_bytes():
                    pids.add(int(folder.name))
        return pids

    return processes


@pytest.fixture(scope="session", autouse=True)
def _forked_workers():
    with forked_workers():
        yield


@pytest.fixture(autouse=True)
def _threads():
    """Every test starts with the same number of threads; a run changes it for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder of random weights with the character tokenizer, as `zerokl init` would write it."""
    return random_model(tmp_path_factory.mktemp("model"), TWO_LAYERS)


@pytest.fixture(scope="session", params=["float32", "bfloat16"])
def decoder(request: pytest.FixtureRequest, model: Path) -> Decoder:
    """The model in each compute dtype. Tests must not change its weights."""
    return load_decoder(model, getattr(torch, request.param))


@pytest.fixture(scope="session")
def sampler(decoder: Decoder) -> NativeSampler:
    return NativeSampler(decoder)


@pytest.fixture(scope="session")
def config(model: Path) -> Callable[..., Config]:
    """config(**overrides): a run of three steps, 3 prompts x 3 samples x 8 tokens.

    The name of an override has two underscores where the key has a dot. The reward is graded, except with the
    preset pass_at_k.
    """
    base = {
        "model": str(model),
        "steps": "3",
        "prompts": "3",
        "num_generations": "3",
        "sampling.max_tokens": "8",
        "virtual_shards": "4",
        "optimizer.lr": "1e-2",
        "evaluation.every": "0",
        "task.reward": "toy:letters",
        "task.reward_processes": "1",
        "workers": "1",
        "task.options": {"max_value": 9, "train": 20, "held_out": 10},
    }

    def make(**overrides: object) -> Config:
        values = {k.replace("__", "."): str(v) if isinstance(v, Path) else v for k, v in overrides.items()}
        binary = {"task.reward": "toy:odd"} if values.get("loss.preset") == "pass_at_k" else {}
        return load_config(None, None, base | binary | values)

    return make


@pytest.fixture
def without_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No number at an operation is tried on a log that no hypothesis explains, which takes seconds."""
    monkeypatch.setattr("zerokl.audit.knobs.column._MOST_WEIGHTS", 0)


@pytest.fixture(scope="session")
def read_jsonl() -> Callable[[Path], list[dict]]:
    return lambda path: [json.loads(line) for line in path.read_text().splitlines()]
