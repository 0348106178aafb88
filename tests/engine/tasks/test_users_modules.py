"""Modules of a user's are found in the task's directory, in every process that needs them, and nowhere else.

The trainer's own search path is afterwards what it was before.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from zerokl.engine.config.loss_section import LossConfig
from zerokl.engine.config.run_config import TaskConfig
from zerokl.engine.runs.run import train
from zerokl.engine.tasks.loading import load_task, problems_of
from zerokl.engine.tasks.rewards import open_reward
from zerokl.engine.train.losses.surrogate_check import check_surrogate

# A module with a sibling, which imports another one when it is called; a package with relative imports.
MODULES = {
    "own_task.py": '''
from dataclasses import dataclass

import own_words
from zerokl.engine.tasks.base import Problem


@dataclass(frozen=True)
class Riddle(Problem):
    """A problem of a class of the user's, which must reach the reward's process."""

    hint: str = ""


class Riddles:
    chat = False

    def problems(self, split):
        from own_late import COUNT

        return [Riddle(i, f"{i}=", str(i), hint=own_words.HINT) for i in range(COUNT)]

    def reward(self, problem, completion):
        from own_later import score

        return score(problem.hint, completion)


def letters(problem, completion):
    from own_later import letters

    return letters(completion)
''',
    "own_words.py": 'HINT = "abc"\n',
    "own_late.py": "COUNT = 5\n",
    "own_later.py": """
def score(hint, completion):
    return float(completion == hint)


def letters(completion):
    return sum(c.isalpha() for c in completion) / 8
""",
    "own_package/__init__.py": "",
    "own_package/bounds.py": """
from . import slopes


def ppo(r, A, logp, low, high):
    return slopes.clip(r, A, logp, low, high)
""",
    "own_package/slopes.py": """
def clip(r, A, logp, low, high):
    from own_clip import clip

    return clip(r, A, logp, low, high)
""",
    "own_clip.py": "from zerokl.engine.train.losses.surrogates import clip\n",
}


def _loaded() -> set[str]:
    return {name for name in sys.modules if name.startswith("own_")}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A directory of modules that is not on the search path. This is not changed when the test ends."""
    folder = tmp_path / "modules"
    for name, text in MODULES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.chdir(tmp_path)  # the current directory has none of them
    path = list(sys.path)
    yield str(folder)
    assert sys.path == path
    for name in _loaded():
        del sys.modules[name]


def test_a_task_and_its_reward_find_their_siblings(directory):
    path, name = list(sys.path), "own_task:Riddles"
    task = load_task(name, {}, directory)
    assert sys.path == path
    problems = problems_of(task, name, "train", directory)
    assert sys.path == path
    assert [p.hint for p in problems] == ["abc"] * 5
    settings = TaskConfig(name=name, directory=directory, reward_processes=2).reward_settings
    with open_reward(task, settings) as reward:
        assert reward.values(problems, [["abc", "x"]] * 5).tolist() == [[1.0, 0.0]] * 5
    assert "own_later" not in _loaded(), "the reward was computed in processes of its own"


def test_control_without_the_directory_nothing_is_found(directory):
    with pytest.raises(ValueError, match="own_task:Riddles cannot be imported as module:object; it raised"):
        load_task("own_task:Riddles", {})
    task = load_task("own_task:Riddles", {}, directory)
    with pytest.raises(ValueError, match="No module named 'own_late'"):
        problems_of(task, "own_task:Riddles", "train")
    with pytest.raises(ValueError, match=r"own_package\.bounds:ppo cannot be imported"):
        check_surrogate(LossConfig(surrogate="own_package.bounds:ppo"))


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_has_a_reward_and_a_surrogate_from_its_tasks_directory(config, tmp_path, directory, workers):
    user_settings = {"task__reward": "own_task:letters", "loss__surrogate": "own_package.bounds:ppo"}
    shared = {"loss__preset": "grpo", "updates_per_rollout": 2, "workers": workers}
    run = train(config(task__directory=directory, **user_settings, **shared), tmp_path / "own")
    assert run.weights == train(config(**shared), tmp_path / "toy").weights
