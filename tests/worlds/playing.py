"""Plays environments of other libraries: by hand, and by the smallest model in a run that is read again."""

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerokl.cli import main
from zerokl.engine.tasks.environment import EnvironmentKey, Observation
from zerokl.engine.tasks.loading import load_task
from zerokl.engine.tasks.users_code import awaited

from tests.random_model import ONE_LAYER, random_model

# Tokens that end a turn: all but digits. So a turn is a number, or nothing.
_STOPS = [0, 1, 2, *(3 + i for i, c in enumerate(string.printable) if not c.isdigit())]


def played(
    name: str, options: dict[str, Any], turns: Sequence[str], problem: int = 0, sample: int = 0
) -> list[Observation]:
    """What an environment says at the beginning, and to each of these turns."""
    return played_by_turns(name, options, [turns], problem, [sample])[0]


def played_by_turns(
    name: str, options: dict[str, Any], games: Sequence[Sequence[str]], problem: int, samples: Sequence[int]
) -> list[list[Observation]]:
    """The same of several games that one process plays side by side, a turn of each after the other."""
    task = load_task(name, options)
    problem = task.problems("train")[problem]
    environments = [task.environment() for _ in games]
    observations = []
    for environment, sample in zip(environments, samples, strict=True):
        first = awaited(environment.reset(problem, EnvironmentKey(0, 0, 0, problem.id, sample)))
        observations.append([first if isinstance(first, Observation) else Observation(first)])
    for k in range(max(map(len, games))):
        for environment, turns, answers in zip(environments, games, observations, strict=True):
            if k < len(turns):
                answers.append(awaited(environment.step([], turns[k])))
    for environment in environments:
        if hasattr(environment, "close"):
            awaited(environment.close())
    return observations


def winning(name: str, options: dict[str, Any], turn: str, numbers: int, problem: int) -> int:
    """The number from 1 to `numbers` whose turn wins a problem's game. turn: with a place for the number."""
    for number in range(1, numbers + 1):
        last = played(name, options, [turn % number], problem)[-1]
        if last.done:
            assert last.reward == 1.0
            return number
    raise AssertionError("no number was right")


def trained(folder: Path, name: str, options: dict[str, Any], *words: str) -> list[dict[str, Any]]:
    """Two exact steps of a model of one layer, and the run read again. Returns the lines of its rollouts."""
    model = random_model(folder / "model", ONE_LAYER, characters=string.printable)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": _STOPS}))
    (folder / "config.toml").write_text(
        f'model = "{model}"\nsteps = 2\nprompts = 4\nnum_generations = 8\nworkers = 1\n'
        f'[task]\nname = "{name}"\noptions = {_toml(options)}\n'
        "[environment]\nmax_turns = 4\nprocesses = 2\n[sampling]\nmax_tokens = 3\n[evaluation]\nevery = 0\n"
    )
    run = folder / "run"
    assert main(["train", str(folder / "config.toml"), "--run_dir", str(run), *words]) == 0
    assert json.loads((run / "summary.json").read_text())["mismatch_max_abs"] == 0.0
    assert main(["verify", "run", str(run)]) == 0
    return [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]


def _toml(options: dict[str, Any]) -> str:
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in options.items()) + " }"
