"""Environments in their processes: what they answer, and whatever goes wrong with one of them."""

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from zerokl.engine.tasks.environment import EnvironmentKey, Turn
from zerokl.engine.tasks.environments import (
    Answer,
    Environments,
    EnvironmentSettings,
    Failure,
    Game,
    open_environments,
)
from zerokl.engine.tasks.loading import TASKS, load_task
from zerokl.engine.tasks.problem import Problem

WORLD = '''
import asyncio
import json
import os
import signal
import threading
import time

from zerokl.engine.tasks.environment import Observation
from zerokl.engine.tasks.problem import Problem


class Dice:
    """Says a random number each turn; done after the fifth turn. What a turn says may plant a fault."""

    def reset(self, problem, key):
        self.random, self.group, self.sum = key.random(), key.group_random(), 0
        self.content = json.loads(problem.answer or "0")
        return f"{problem.prompt} {self.random.random()} {self.group.random()}"

    def step(self, ids, text):
        self.sum += sum(ids)
        getattr(self, text, lambda: None)()
        return Observation(f"{self.sum} {self.random.random()}", reward=self.sum / 8, done=len(text) == 5)

    def raises(self):
        raise KeyError("a\\nb")

    def exits(self):
        os._exit(3)

    def is_killed(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def hangs(self):
        time.sleep(60)

    def forks(self):
        if os.fork() == 0:
            raise SystemExit

    def waits_for_more(self):
        self.writes((100_000).to_bytes(8, "big"))

    def claims_much(self):
        self.writes((1 << 30).to_bytes(8, "big"))

    def answers_twice(self):
        answer = b'{"value": {"content": "x", "rewards": [1.0], "done": true, "player": 0, "history": ""}}'
        self.writes((len(answer).to_bytes(8, "big") + answer) * 2)

    def answers_for_it(self):
        value = {"content": self.content, "rewards": [1.0], "done": False, "player": 0}
        answer = json.dumps({"value": value | {"history": ""}}).encode()
        self.writes(len(answer).to_bytes(8, "big") + answer)
        time.sleep(60)

    def writes(self, text):
        for place in os.listdir("/proc/self/fd"):
            try:
                if os.readlink(f"/proc/self/fd/{place}").startswith("socket:"):
                    os.write(int(place), text)
            except OSError:
                pass

    def stops(self):
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGSTOP)).start()

    def prints(self):
        print("seen", flush=True)


class Waits(Dice):
    async def step(self, ids, text):
        await asyncio.sleep(0.001)
        return Dice.step(self, ids, text)


class Fickle(Dice):
    """Does not do the same again."""

    def reset(self, problem, key):
        return super().reset(problem, key) + str(time.perf_counter_ns())


class Odd:
    """Answers what no environment may."""

    answers = {
        "none": None, "nan": Observation("x", reward=float("nan")), "bytes": Observation(b"x"),
        "huge": Observation("x", reward=1e30), "pair": Observation("x", reward=[1.0, 2.0]),
        "mixed": Observation([1, "a"]), "player": Observation("x", player=1),
        "done": Observation("x", done=1),
        "message": Observation([{"content": "x"}]), "negative": Observation([3, -1]),
        "half": Observation("a\\ud800"),
        "half inside": Observation([{"role": "user", "content": ["\\udfff"]}]),
        "long": Observation("x" * 262_145), "ids": Observation([0] * 262_145),
        "fits": Observation("x" * 262_144),
        "long message": Observation([{"role": "user", "content": "x" * 262_144}]),
        "widest": Observation("\U0001f600" * 262_144), "digits": Observation([10**4000] * 2000),
    }

    def reset(self, problem, key):
        return "x"

    def step(self, ids, text):
        return self.answers[text]


class Closes:
    def reset(self, problem, key):
        self.place = problem.answer
        return "x"

    def step(self, ids, text):
        return Observation("x", done=text == "end")

    def close(self):
        with open(self.place, "a") as file:
            file.write("closed\\n")


class Numbers(Dice):
    tools = {1, 2}


class Named(Dice):
    tools = ["add"]


def breaks():
    raise OSError("no such database")


def task(kind):
    class Task:
        chat = False
        environment = kind

        def problems(self, split):
            return [Problem(i, str(i), "") for i in range(4)]

    return Task


dice, waits, fickle, odd, closes = map(task, (Dice, Waits, Fickle, Odd, Closes))
numbers, named, broken = task(Numbers), task(Named), task(staticmethod(breaks))
'''


@pytest.fixture(autouse=True)
def world(tmp_path, monkeypatch):
    (tmp_path / "world.py").write_text(WORLD)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("world", None)


@contextmanager
def opened(name: str, n: int = 2, say=print, **limits) -> Iterator[Environments]:
    settings = {"timeout_s": 20.0, "memory_bytes": 0} | limits
    with open_environments(EnvironmentSettings(f"world:{name}", {}, "", n, **settings), say) as environments:
        yield environments


def answers_of(environments: Environments, plays: list[Game]) -> list[Answer | Failure]:
    """What each environment answers, in the order of the games."""
    for game in plays:
        environments.ask(game)
    answers = {}
    while len(answers) < len(plays):
        answers |= {id(game): answer for game, answer in environments.answers(wait=True)}
    return [answers[id(game)] for game in plays]


def games(n: int) -> list[Game]:
    problems = [Problem(i // 2, f"problem {i // 2}", "") for i in range(n)]
    return [Game(problem, EnvironmentKey(1, 2, 3, problem.id, i % 2)) for i, problem in enumerate(problems)]


def played(environments: Environments, turns: list[list[str]]) -> list[list[Answer | Failure]]:
    """The answers of each game. turns: for each game what the model says."""
    plays = games(len(turns))
    answers = [[] for _ in plays]

    def answer(going: list[int]) -> None:
        for i, answer in zip(going, answers_of(environments, [plays[i] for i in going]), strict=True):
            answers[i].append(answer)
            if isinstance(answer, Answer):
                plays[i].answered(answer)

    answer(list(range(len(plays))))
    for k in range(max(map(len, turns))):
        going = [i for i, texts in enumerate(turns) if k < len(texts) and type(answers[i][-1]) is Answer]
        for i in going:
            plays[i].turns.append(Turn([k, i], turns[i][k]))
        answer(going)
    return answers


CALM = [["a", "b", "c"]] * 6


@pytest.mark.parametrize("name", ["dice", "waits"])
def test_answers_follow_from_problem_key_and_turns_alone(name):
    with opened(name, 1) as one, opened(name, 3) as three:
        expected = played(one, CALM)
        assert played(three, CALM) == expected
        assert played(three, CALM) == expected, "a second time"
    firsts = [answers[0].content.split() for answers in expected]
    assert len({first[2] for first in firsts}) == 6, "each trajectory has numbers of its own"
    assert len({first[3] for first in firsts}) == 3, "a group has some in common"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raises", r"raised KeyError \('a\\nb'\), in .*world.py line \d+"),
        ("exits", "its process ended with exit code 3"),
        ("is_killed", "its process was killed by SIGKILL"),
        pytest.param("hangs", r"took more than 3 s \(environment.timeout_s\)", marks=pytest.mark.full),
        ("forks", r"raised SystemExit \(\)|^$"),
    ],
)
def test_a_crash_ends_one_trajectory_and_its_neighbours_are_played_again(fault, reason):
    """All games are in one process, so the crash takes each neighbour's environment with it."""
    turns = [["a", "b", "c"], ["a", fault, "c"], ["a", "b", "c"]]
    with opened("dice", 1, timeout_s=3.0) as environments:
        expected, answers = played(environments, [*turns[:1] * 3]), played(environments, turns)
    if fault != "forks":  # the child's answer is dropped, and the parent goes on
        assert [type(answer) for answer in answers[1]] == [Answer, Answer, Failure]
        assert re.search(reason, answers[1][2].reason)
        assert answers[1][2].timed_out == (fault == "hangs")
    for i in (0, 2):
        assert answers[i] == expected[i]


def test_an_environment_that_does_not_do_the_same_again_is_named():
    with opened("fickle", 1) as environments:
        answers = played(environments, [["a", "b"], ["a", "exits"], ["a", "b", "c"]])
    assert "answered otherwise" in answers[2][-1].reason


@pytest.mark.full
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("none", "step returned None"),
        ("nan", r"reward \(nan\)"),
        ("huge", r"reward \(1e\+30\)"),
        ("bytes", r"content \(b'x'\)"),
        ("pair", "must be a number for each of 1 players"),
        ("mixed", "must be a string"),
        ("player", r"player \(1\) must lie in 0 to 0"),
        ("done", r"done \(1\) must be of type bool"),
        ("message", "must have a `role`"),
        ("half", r"content is not valid Unicode: character 1 is '\\ud800'"),
        ("half inside", "content is not valid Unicode: character "),
        ("long", "content of 262,145 characters must have at most 262,144"),
        ("ids", "content of 262,145 ids must have at most 262,144"),
        ("long message", "content of 262,177 characters must have at most 262,144"),
        ("digits", r"wrote an answer of [\d,]+ bytes; 4,194,304 at most"),
    ],
)
def test_what_no_environment_may_answer_is_one_line(text, reason):
    with opened("odd", 1) as environments:
        answers = played(environments, [[text]])
    assert re.search(reason, answers[0][1].reason)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("numbers", r"tools \({1, 2}\) must be JSON"),
        ("named", r"tools \(\['add'\]\) must be a list of JSON schemas"),
        ("broken", r"environment\(\) raised OSError \(no such database\), in .*world.py line \d+"),
    ],
)
def test_an_environment_that_cannot_be_made_is_one_line(name, reason):
    with pytest.raises(ValueError, match=reason) as refusal, opened(name, 1):
        pass
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["fits", "widest"])
def test_the_longest_content_is_taken(text):
    with opened("odd", 1) as environments:
        assert len(played(environments, [[text]])[0][1].content) == 262_144


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("waits_for_more", r"took more than 1 s \(environment.timeout_s\)"),
        ("claims_much", "wrote an answer of 1,073,741,824 bytes"),
        ("answers_twice", "wrote into the connection of its process to the run"),
    ],
)
def test_what_is_written_to_the_connection_holds_nobody_up(fault, reason):
    began = time.monotonic()
    with opened("dice", 1, timeout_s=1.0) as environments:
        answers = played(environments, [["a", fault, "c"], ["a", "b", "c"]])
    assert re.search(reason, answers[0][-1].reason)
    assert [type(answer) for answer in answers[1]] == [Answer] * 4, "its neighbour is played again"
    assert time.monotonic() - began < 15


def test_a_process_that_reads_nothing_holds_nobody_up():
    with opened("dice", 1, timeout_s=1.0) as environments:
        (game,) = games(1)
        for text in ("", "stops"):
            (answer,) = answers_of(environments, [game])
            game.answered(answer)
            game.turns.append(Turn([1], text))
        (answer,) = answers_of(environments, [game])
        assert type(answer) is Answer
        time.sleep(1.0)
        game.answered(answer)
        game.turns.append(Turn([1], "x" * (1 << 24)))
        (answer,) = answers_of(environments, [game])
        assert answer.timed_out


@pytest.mark.parametrize("content", ['"\\ud800"', "5", "null", '{"a": 1}', "[[1]]", '["a", 1]', "[true]"])
def test_a_forged_answer_is_looked_at_as_well(content):
    """It has not passed through sessions.py."""
    with opened("dice", 1, timeout_s=5.0) as environments:
        game = Game(Problem(0, "x", content), EnvironmentKey(1, 2, 3, 0, 0))
        (answer,) = answers_of(environments, [game])
        game.answered(answer)
        game.turns.append(Turn([1], "answers_for_it"))
        (answer,) = answers_of(environments, [game])
    assert "which no environment does" in answer.reason


def test_ids_are_ids_and_lines_are_shown():
    lines = []
    with opened("odd", 1) as environments:
        assert played(environments, [["negative"]])[0][1].content == [3, -1], "the renderer refuses it"
    with opened("dice", 1, lines.append) as environments:
        played(environments, [["prints"]])
    assert lines == ["environment prints: seen"]


def test_environments_are_closed_once(tmp_path):
    file = tmp_path / "closed"
    with opened("closes", 1) as environments:
        for text in ("end", "go on"):
            game = Game(Problem(0, "x", str(file)), EnvironmentKey(0, 0, 0, 0, 0))
            (answer,) = answers_of(environments, [game])
            game.answered(answer)
            game.turns.append(Turn([1], text))
            answers_of(environments, [game])
            environments.close_games()
            assert file.read_text() == "closed\n"
            file.unlink()


@pytest.mark.parametrize(
    ("name", "message"), [("nothing", "cannot be imported"), ("Odd", "must make an obj")]
)
def test_a_task_without_an_environment_is_refused(name, message):
    with pytest.raises(ValueError, match=message), opened(name):
        pass


# The problems of python are in a file (test_python_tool.py).
MANY_TURNS = [name for name, task in TASKS.items() if hasattr(task, "environment") and name != "python"]


@pytest.mark.parametrize("name", MANY_TURNS)
def test_a_demonstration_solves_its_problem(name):
    """Played in this process, without the executor."""
    task = load_task(name, {})
    demonstration = getattr(task, "demonstration", lambda problem: [problem.answer])
    for problem in task.problems("train")[:50]:
        environment, turns = task.environment(), demonstration(problem)
        environment.reset(problem, EnvironmentKey(0, 0, 0, 0, 0))
        observations = [environment.step([], text) for text in turns]
        assert [o.done for o in observations] == [False] * (len(turns) - 1) + [True]
        reward = observations[-1].reward
        assert (max(reward) if isinstance(reward, list) else reward) == 1.0
        broken = task.environment()
        broken.reset(problem, EnvironmentKey(0, 0, 0, 0, 0))
        assert broken.step([], "nonsense").reward == 0.0, "control"


def test_wordle_marks_letters_as_the_game_does():
    from zerokl.engine.tasks.wordle import signs

    assert signs("speed", "abide") == "--.-."
    assert signs("allee", "apple") == "+.--+"
    assert signs("aab", "caa") == ".+-"
    assert signs("ab", "caa") == "?"


def test_the_held_out_opponent_of_nim_never_loses_a_game_that_can_be_won():
    task = load_task("nim", {"max_stones": 9})
    for problem in task.problems("held_out"):
        environment, stones = task.environment(), int(problem.prompt[:-1])
        environment.reset(problem, EnvironmentKey(0, 0, 0, 0, 0))
        observation = environment.step([], str(stones % 4))  # the winning move
        while not observation.done:
            left = int(observation.content[:-1])
            assert left % 4, "a perfect player cannot help leaving a number that can be won"
            observation = environment.step([], str(left % 4))
        assert observation.reward == [1.0, 0.0]
