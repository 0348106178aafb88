"""A turn that calls tools: from the drawn ids to the environment, and from its answer to the next prompt."""

import string
from collections.abc import Sequence

import numpy as np
import pytest
from zerokl.engine.config.run_config import EnvironmentConfig
from zerokl.engine.rollout.players import turn_limits
from zerokl.engine.rollout.turns import TurnPlayer
from zerokl.engine.rollout.types import Completion, GenerationParams, Request, RngKey
from zerokl.engine.tasks.environments import EnvironmentSettings, open_environments
from zerokl.engine.tasks.problem import Problem
from zerokl.engine.tasks.rendering import Renderer
from zerokl.engine.tasks.tokenizer import Tokenizer, character_tokenizer
from zerokl.kernels.sampling_params import SamplingParams

WORLD = '''
from zerokl.engine.tasks.environment import Observation
from zerokl.engine.tasks.tool_calls import answers


def add(a: int, b: int) -> int:
    return a + b


class Adds:
    """A turn without a call is the answer, whose reward is its length."""

    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {
        "a": {"type": "integer"}, "b": {"type": "integer"}}}}}]

    def reset(self, problem, key):
        return problem.prompt

    def step(self, ids, text, calls):
        if not calls.calls and not calls.error:
            return Observation(reward=len(text), done=True)
        return Observation(answers(calls, {"add": add}))


def task(form):
    class Environment(Adds):
        tool_calls = form

    class Task:
        chat = True
        environment = Environment

        def problems(self, split):
            return [Problem(0, "1+2=", "3")]

    return Task


as_json, as_xml, as_template, as_yaml = map(task, ("json", "xml", "template", "yaml"))
'''
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# How a model of its own kind calls a tool: [add|{"a": "1"}].
RESPONSE = {
    "version": 1,
    "start_anchor": "<assistant>",
    "defaults": {"role": "assistant"},
    "fields": {
        "content": {"close": "<eos>"},
        "tool_calls": {
            "open_pattern": r"\[(?P<name>\w+)\|",
            "close": "]",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"


@pytest.fixture
def tokenizer(tmp_path, monkeypatch):
    (tmp_path / "toolworld.py").write_text(WORLD)
    monkeypatch.chdir(tmp_path)

    def make(response: object = RESPONSE) -> Tokenizer:
        hf = character_tokenizer(CHARACTERS)
        hf.chat_template, hf.response_template = TEMPLATE, response
        hf.save_pretrained(tmp_path / "tokenizer")
        return Tokenizer(tmp_path / "tokenizer", 120)

    return make


class Says:
    """A sampler that draws these turns."""

    def __init__(self, tokenizer: Tokenizer, turns: Sequence[str]):
        self.tokenizer, self.turns, self.prompts = tokenizer, iter(turns), []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        (request,) = requests
        self.prompts.append(self.tokenizer.text(request.ids))
        ids = (*self.tokenizer.encode_plain(next(self.turns)), min(self.tokenizer.stop_ids))
        return [Completion(ids, np.zeros(len(ids), np.float32), "stop", 0)]

    def end_turns(self) -> None:
        pass


def play(tokenizer: Tokenizer, form: str, turns: Sequence[str]) -> tuple[str, list[float]]:
    """The text of a trajectory in which the model says `turns`, and the rewards of its turns."""
    sampler = Says(tokenizer, turns)
    with open_environments(EnvironmentSettings(f"toolworld:as_{form}", {}, "", 1, 20.0, 0)) as environments:
        renderer = Renderer(tokenizer, True, tools=environments.about.tools)
        limits = turn_limits(EnvironmentConfig(max_turns=8), 200, 2000)
        player = TurnPlayer(tokenizer, environments, renderer, limits, print)
        params = GenerationParams(SamplingParams(), 1, 200, frozenset(tokenizer.stop_ids))
        episodes = player.play(sampler, [Problem(0, "1+2=", "3")], params, RngKey(0, 0))
    (rollout,) = episodes.rollouts
    assert rollout.finish == "done"
    return tokenizer.text(rollout.ids), episodes.turn_rewards[0]


FORMS = {
    "json": ('{"name": "add", "arguments": {"a": 1, "b": 2}}', '{"name": "add", "arguments": {"a": 1}}', "{"),
    "xml": (
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>',
        "so <tool_call><function=add><parameter=a>1</parameter></function></tool_call>",
        "<tool_call>",
    ),
    # The response template casts "1" to the integer of the tool's schema.
    "template": ('i add [add|{"a": "1", "b": 2}]', '[add|{"a": 1}]', "[add|{"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_turn_calls_a_tool_and_reads_its_answer(tokenizer, form):
    whole, lacking, half = FORMS[form]
    text, rewards = play(tokenizer(), form, [whole, lacking, half, "so 3"])
    head, *after = text.split("<assistant>")
    assert head == "<user>1+2=<eos>\n"
    assert after[0] == f"{whole}<eos>\n<tool>3<eos>\n"
    assert after[1] == f"{lacking}<eos>\n<tool>error: add missing a required argument: 'b'<eos>\n"
    assert after[2].startswith(f"{half}<eos>\n<tool>error: your turn ")
    assert after[3] == "so 3<eos>"
    assert rewards == [0.0, 0.0, 0.0, 4.0]


def test_a_form_that_nobody_knows_or_that_the_tokenizer_has_not_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"tool_calls \('yaml'\) must be one of json, xml, template"):
        play(tokenizer(), "yaml", [])
    with pytest.raises(ValueError, match="needs a tokenizer with a response_template"):
        play(tokenizer(None), "template", [])
