"""docs/environments.md: its example trains exactly, solves itself, and has the ends that the page lists."""

import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import zerokl
from zerokl.cli import main
from zerokl.engine.config.run_config import EnvironmentConfig
from zerokl.engine.rollout.players import turn_limits
from zerokl.engine.rollout.turns import TurnPlayer
from zerokl.engine.rollout.types import Completion, GenerationParams, Request, RngKey
from zerokl.engine.tasks.calculator import Calculator
from zerokl.engine.tasks.environment import ENDS, VOID, EnvironmentKey, Observation
from zerokl.engine.tasks.environments import EnvironmentSettings, open_environments
from zerokl.engine.tasks.problem import Problem
from zerokl.engine.tasks.rendering import Renderer
from zerokl.engine.tasks.tokenizer import Tokenizer, character_tokenizer
from zerokl.engine.tasks.tool_calls import answers, parse_calls
from zerokl.kernels.sampling_params import SamplingParams

from tests.engine.rollout.test_tools import Says
from tests.random_model import ONE_LAYER, random_model

DOCS = Path(zerokl.__file__).parent / "docs"
PAGE = (DOCS / "environments.md").read_text()


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


def test_the_pages_command_trains_in_the_example_exactly(tmp_path):
    """As the page has it, but with a random model of one layer, and two steps."""
    (command,) = re.findall(r"^(zerokl train .* myenvironment:Game[^`]*)```", PAGE, re.MULTILINE)
    model = random_model(tmp_path / "model", ONE_LAYER)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, *range(20, 60)]}))
    few = f"--model {model} --steps 2 --prompts 2 --num_generations 4 --evaluation.every 0"
    few += " --workers 1 --environment.processes 1"
    words = shlex.split(command.replace("\\\n", "") + few)[1:]
    assert main(words) == 0
    run = Path("runs/game")
    assert json.loads((run / "summary.json").read_text())["mismatch_max_abs"] == 0.0
    lines = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert {line["prompt_text"] for line in lines} == {"0-14:"}
    assert max(len(line["turn_rewards"]) for line in lines) > 1
    assert main(["verify", "run", str(run)]) == 0


def test_the_pages_step_calls_its_tool():
    """The example of `tool_calls`, in an environment that adds."""
    (step,) = re.findall(r"```python\n(def step\(self, ids, text, calls\).*?)```", PAGE, re.DOTALL)
    scope = {"Observation": Observation, "answers": answers, "add": lambda a, b: a + b}
    exec(step, scope)
    world = SimpleNamespace(answer="3")
    call = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
    (message,) = scope["step"](world, [], call, parse_calls(call, "json")).content
    assert (message["role"], message["content"]) == ("tool", "3")
    assert scope["step"](world, [], "3", parse_calls("3", "json")) == Observation(reward=1.0, done=True)
    assert scope["step"](world, [], "4", parse_calls("4", "json")).reward == 0.0, "control"


class Told(Says):
    """Notes of each request how many ids it has, and how many tokens were drawn before."""

    def __init__(self, tokenizer: Tokenizer, turns: list[str]):
        super().__init__(tokenizer, turns)
        self.requests = []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.requests.append((str(len(requests[0].ids)), str(requests[0].drawn)))
        return super().generate(requests)


def test_the_page_follows_a_trajectory_of_the_calculator(tmp_path):
    character_tokenizer().save_pretrained(tmp_path)
    tokenizer, problem = Tokenizer(tmp_path, 64), Problem(0, "12*7+5=", "89")
    sampler = Told(tokenizer, Calculator().demonstration(problem))
    with open_environments(EnvironmentSettings("calculator", {}, "", 1, 20.0, 0)) as environments:
        limits = turn_limits(EnvironmentConfig(), 10, 512)
        player = TurnPlayer(tokenizer, environments, Renderer(tokenizer, chat=False), limits, print)
        params = GenerationParams(SamplingParams(), 1, 10, frozenset(tokenizer.stop_ids))
        episodes = player.play(sampler, [problem], params, RngKey(0, 0))
    (rollout,) = episodes.rollouts
    table = re.findall(r"^\| (\d+) to (\d+) \| `(.+)` \| (yes|no) \|(.*)\|$", PAGE, re.MULTILINE)
    rows = [(int(a), int(b) + 1, text, drawn == "yes") for a, b, text, drawn, _ in table]
    ids = [i for a, b, *_ in rows for i in range(a, b)]
    assert ids == list(range(len(rollout.ids)))
    for a, b, text, drawn in rows:
        assert (tokenizer.text(rollout.ids[a:b]), set(rollout.drawn[a:b].tolist())) == (text, {drawn})
    requests = [re.findall(r"\d+", source) for *_, source in table if "request" in source]
    assert [tuple(numbers) for numbers in requests] == sampler.requests
    assert f"reads all {len(rollout.ids)} ids" in PAGE
    assert f"scores the {len(rollout.logprobs)} drawn tokens" in PAGE
    assert (episodes.rewards.tolist(), rollout.finish) == ([[1.0]], "done")


def test_the_page_lists_every_end_and_whether_it_is_trained_on():
    rows = re.findall(r"^\| `([a-z ]+)` \| [^|]+ \| (yes|no) \|", PAGE, re.MULTILINE)
    assert dict(rows) == {end: "no" if end in VOID else "yes" for end in ENDS}
