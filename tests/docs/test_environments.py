"""docs/environments.md: its example trains exactly, solves itself, and has the ends that the page lists."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import zerokl
from zerokl.cli import main
from zerokl.engine.tasks.environment import ENDS, VOID, EnvironmentKey

from tests.random_model import ONE_LAYER, random_model

DOCS = Path(zerokl.__file__).parent / "docs"


@pytest.fixture(autouse=True)
def _as_a_user(tmp_path, monkeypatch):
    """The working directory is a fresh one, and the examples' modules lie on the path."""
    before = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(DOCS / "examples"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    torch.set_num_threads(before)


def test_the_demonstration_solves_every_problem():
    import myenvironment

    task = myenvironment.Game()
    for problem in task.problems("train"):
        environment = task.environment()
        assert environment.reset(problem, EnvironmentKey(0, 0, 0, 0, 0)) == "0-14:"
        *before, last = [environment.step([], text) for text in task.demonstration(problem)]
        assert (last.reward, last.done) == (1.0, True)
        assert not any(observation.done or observation.reward for observation in before)


def test_a_run_of_the_example_is_exact(tmp_path):
    model = random_model(tmp_path / "model", ONE_LAYER)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, *range(20, 60)]}))
    words = "--task.name myenvironment:Game --environment.max_turns 4 --sampling.max_tokens 4 --steps 2"
    more = "--prompts 2 --num_generations 4 --evaluation.every 0 --workers 1 --environment.processes 1"
    words = ["train", "--run_dir", "run", "--model", str(model), *words.split(), *more.split()]
    assert main(words) == 0
    assert json.loads(Path("run/summary.json").read_text())["mismatch_max_abs"] == 0.0
    lines = [json.loads(line) for line in Path("run/rollouts.jsonl").read_text().splitlines()]
    assert {line["prompt_text"] for line in lines} == {"0-14:"}
    assert max(len(line["turn_rewards"]) for line in lines) > 1
    assert main(["verify", "run", "run"]) == 0


def test_the_page_lists_every_end_and_whether_it_is_trained_on():
    page = (DOCS / "environments.md").read_text()
    rows = re.findall(r"^\| `([a-z ]+)` \| [^|]+ \| (yes|no) \|", page, re.MULTILINE)
    assert dict(rows) == {end: "no" if end in VOID else "yes" for end in ENDS}
