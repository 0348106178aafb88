"""GEM's own environments, and one of Gymnasium's, through the adapter."""

import pytest
from zerokl.engine.tasks.loading import load_task

from tests.worlds.playing import played, played_by_turns, trained, winning

pytestmark = pytest.mark.worlds
TASK = "zerokl.integrations.environments.gym:Gym"
GEM = {"id": "game:GuessTheNumber-v0-easy", "chat": False}
ECHO = {"id": "texts:Echo-v0", "make": "gymnasium:make", "chat": False}


def test_gem_says_what_it_asks_for_and_ends():
    first, second = played(TASK, GEM, ["nonsense"])
    assert first.content.startswith("\nYou are playing Guess The Number.")
    assert first.content.endswith("to start the game.\nEnter your next guess.\n")
    assert (second.done, second.reward) == (True, -0.1)


def test_gem_is_won_and_a_problem_is_its_seed():
    numbers = [winning(TASK, GEM, r"\boxed{%d}", 10, problem) for problem in range(5)]
    assert numbers == [winning(TASK, GEM, r"\boxed{%d}", 10, problem) for problem in range(5)]
    assert len(set(numbers)) > 1


def test_gymnasium_ends_where_it_is_truncated_and_follows_from_seed_and_key():
    alone = [played(TASK, ECHO, ["a", "bc", "def"], sample=sample) for sample in range(2)]
    assert played_by_turns(TASK, ECHO, [["a", "bc", "def"]] * 2, 0, [0, 1]) == alone
    assert [o.reward for o in alone[0]] == [0.0, 1.0, 2.0, 3.0]
    assert [o.done for o in alone[0]] == [False, False, False, True]
    words = [game[1].content.split() for game in alone]
    assert words[0][1] == words[1][1], "its own generator follows from the seed"
    assert words[0][2] != words[1][2], "Python's follows from the key"
    assert words[0][3] != words[1][3], "and NumPy's"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs an id"),
        ({"id": "x", "make": "nolibrary:make"}, "nolibrary is not installed; pip install nolibrary"),
        ({"id": "x", "train": 0}, r"train \(0\) must be at least 1"),
    ],
)
def test_options_that_make_no_task_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        load_task(TASK, options)


def test_an_unknown_environment_is_named():
    with pytest.raises(ValueError, match="Environment Go-v9 not found"):
        load_task(TASK, {"id": "Go-v9"}).environment()


def test_a_run_in_gem_is_exact_and_can_be_read_again(tmp_path):
    lines = trained(tmp_path, TASK, GEM)
    assert {line["reward"] for line in lines} == {-0.1}


def test_a_run_in_gymnasium_is_exact_and_the_same_with_any_number_of_processes(tmp_path):
    lines = trained(tmp_path / "two", TASK, ECHO)
    assert trained(tmp_path / "one", TASK, ECHO, "--environment.processes", "1") == lines
    assert max(len(line["turn_rewards"]) for line in lines) == 3
    assert len({line["reward"] for line in lines}) > 2, "the steps have a gradient"
