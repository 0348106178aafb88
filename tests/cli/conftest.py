"""A folder to work in, the words of a short run in it, and the check that a command refuses in one line."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from zerokl.cli import main

from tests.helpers import contents
from tests.random_model import ONE_LAYER, random_model

OPTIONS = "{ max_value = 9, train = 20, held_out = 10 }"


REWARDS = """
def letters(problem, completion):
    return sum(c.isalpha() for c in completion) / 8

def nan(problem, completion):
    return float("nan")

def raises(problem, completion):
    raise RuntimeError("two\\nlines")

def huge(problem, completion):
    return 1e200 * sum(c.isalpha() for c in completion)

class Broken:
    def __init__(self):
        raise KeyError("data")

class Fails:
    chat = False

    def problems(self, split):
        return {"train": [("1+1=", "2")]}[split]

    def reward(self, problem, completion):
        return 0.0
"""


@pytest.fixture(scope="session")
def model_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("cli"), ONE_LAYER)


@pytest.fixture
def folder(model_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a model, a module of rewards and nothing else."""
    shutil.copytree(model_source, tmp_path / "model")
    (tmp_path / "mine.py").write_text(REWARDS)
    (tmp_path / "syntax.py").write_text("def f(:")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    sys.modules.pop("mine", None)
    return tmp_path


@pytest.fixture
def training(folder: Path) -> Callable[..., list[str]]:
    """training(key=value, ...): the words of a short run into the folder `run`.

    A key has two underscores where the configuration's key has a dot.
    """
    base = {
        "run_dir": "run",
        "model": str(folder / "model"),
        "steps": "2",
        "prompts": "2",
        "num_generations": "2",
        "sampling__max_tokens": "6",
        "task__options": OPTIONS,
        "task__reward": "mine:letters",
        "evaluation__every": "0",
        "optimizer__lr": "1e-2",
    }

    def words(**values: object) -> list[str]:
        options = {key.replace("__", "."): str(value) for key, value in {**base, **values}.items()}
        return ["train", *(word for key, value in options.items() for word in (f"--{key}", value))]

    return words


@pytest.fixture
def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """refused(*words, leaves=""): the one line that a bad command prints to stderr.

    Every file must be as before, and no file may be new, except in the folder `leaves`.
    """

    def check(*words: str, leaves: str = "") -> str:
        before = contents(folder)
        capsys.readouterr()
        try:
            code = main(list(words))
        except SystemExit as ended:
            code = ended.code
        error = capsys.readouterr().err
        assert code == 2, error
        assert len(error.splitlines()) == 1, error
        assert error.startswith("zerokl: ")
        after = contents(folder)
        if leaves:
            after = {p: content for p, content in after.items() if folder / leaves not in (p, *p.parents)}
        assert after == before
        return error

    return check
