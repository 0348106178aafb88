"""Environments of verifiers through the adapter, with the real library: turns, rewards, failures and runs."""

import pytest
from zerokl.engine.tasks.environment import EnvironmentKey, Observation
from zerokl.engine.tasks.loading import load_task
from zerokl.engine.tasks.users_code import awaited

from tests.worlds.playing import played_by_turns, trained

pytestmark = pytest.mark.worlds
TASK = "zerokl.integrations.environments.verifiers:Verifiers"
NUMBERS = {"taskset": "vf_numbers", "held_out": 2}
SUMS = {"taskset": "vf-single", "train": 16, "chat": False}


def played(options, games: list[list[str]], problem: int = 3) -> list[list[Observation]]:
    """What is said in games that one process plays side by side, a turn of each after the other."""
    return played_by_turns(TASK, options, games, problem, range(len(games)))


def test_a_rollout_is_a_trajectory_and_ends_with_its_reward():
    ((first, second, third, last),) = played(NUMBERS, [["5", "6", "7"]])
    assert first.content == [
        {"role": "system", "content": "Guess."},
        {"role": "user", "content": "0 to 7, task 3:"},
    ]
    assert [message["role"] for message in second.content + third.content] == ["user", "user"]
    assert second.content[0]["content"].startswith("no, 0.")
    assert [answer.done for answer in (first, second, third)] == [False] * 3
    assert (last.done, last.reward) == (True, 0.25), "the weighted sum of the rewards"
    assert played(NUMBERS, [["3"]])[0][-1].reward == 1.25


def test_what_is_drawn_follows_from_the_key_and_from_no_neighbour():
    turns = ["5", "6", "7"]
    both = played(NUMBERS, [turns, turns])
    assert played(NUMBERS, [turns]) == both[:1]
    assert both[0][1].content != both[1][1].content, "numbers of its own"


def test_a_taskset_without_an_environment_has_one_turn():
    ((first, last),) = played(SUMS, [["4"]])
    assert (first.content, last.done, last.reward) == ("\n3+1=\n", True, 1.0)
    assert played(SUMS, [["5"]])[0][-1].reward == 0.0
    assert played(SUMS, [[""]])[0][-1].reward == 0.0, "an empty turn is one"


def test_splits_are_tasks_in_their_order():
    task = load_task(TASK, NUMBERS)
    assert [p.prompt for p in task.problems("held_out")] == ["0 to 7, task 6:", "0 to 7, task 7:"]
    assert len(task.problems("train")) == 6


@pytest.mark.parametrize(
    ("turn", "error", "message"),
    [("fail", KeyError, "planted"), ("again", ValueError, "does not go on with the conversation")],
)
def test_a_failure_of_the_environment_is_raised(turn, error, message):
    with pytest.raises(error, match=message):
        played(NUMBERS, [[turn]])


def test_a_rollout_that_waits_for_a_turn_is_ended():
    task = load_task(TASK, NUMBERS)
    environment = task.environment()
    awaited(environment.close())  # before it has begun
    awaited(environment.reset(task.problems("train")[0], EnvironmentKey(0, 0, 0, 0, 0)))
    assert not environment._rollout.done()
    awaited(environment.close())
    assert environment._rollout.cancelled()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs a taskset"),
        ({"taskset": "vf_single"}, "does not end; set task.options.train"),
        ({"taskset": "vf_numbers", "train": 9}, r"has 8 tasks, fewer than train \(9\)"),
        ({"taskset": "vf_numbers", "environment": "user-sim"}, "has the seats assistant, user"),
    ],
)
def test_what_cannot_be_played_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        load_task(TASK, options)


def test_a_run_is_exact_and_can_be_read_again(tmp_path):
    lines = trained(tmp_path, TASK, {**NUMBERS, "chat": False}, "--environment.processes", "1")
    assert len({line["reward"] for line in lines}) > 1, "the steps have a gradient"
    assert {line["finish"] for line in lines} <= {"done", "tokens"}
