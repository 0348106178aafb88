"""TextArena's own games through the adapter: what is said to whom, the rewards, and a run by self-play."""

import pytest
from zerokl.engine.tasks.environment import EnvironmentKey
from zerokl.engine.tasks.loading import load_task

from tests.worlds.playing import played, played_by_turns, trained, winning

pytestmark = pytest.mark.worlds
TASK = "zerokl.integrations.environments.textarena:TextArena"
NIM = {"game": "Nim-v0", "players": 2, "chat": False}
NUMBERS = {"game": "GuessTheNumber-v0", "chat": False}
# A game with numbers that are drawn after its beginning.
DRAWING = {"game": "2048-v0-ultra-easy", "chat": False}


def test_each_player_reads_what_was_said_since_its_last_move():
    first, second, third = played(TASK, NIM, ["I take [0 3]", "[1 4]"])
    assert first.player == 0
    assert first.content.startswith("\n[GAME] Welcome to Nim, Player 0!")
    assert first.content.endswith("pile 2: 5\n")
    assert second.player == 1
    assert "Welcome to Nim, Player 1!" in second.content
    assert "[Player 0] I take [0 3]\n" in second.content
    assert third.player == 0
    assert "[Player 1] [1 4]\n[GAME] Player 1 removes 4 from pile 1." in third.content
    assert "I take" not in third.content, "a player's own move stands in its trajectory"


def test_the_winner_of_a_game_has_1_and_the_loser_minus_1():
    *before, last = played(TASK, NIM, ["[0 3]", "[1 4]", "[2 5]"])
    assert not any(observation.done or observation.reward for observation in before)
    assert last.done
    assert last.reward == [1.0, -1.0]


def test_an_invalid_move_is_answered_and_a_second_one_loses():
    _, again, lost = played(TASK, NIM, ["nonsense", "nonsense"])
    assert again.player == 0
    assert "attempted an invalid move" in again.content
    assert (lost.done, lost.reward) == (True, [-1.0, 1.0])


def test_a_game_of_one_player_is_won_and_its_problem_is_its_seed():
    numbers = [winning(TASK, NUMBERS, "[%d]", 20, problem) for problem in range(5)]
    assert numbers == [winning(TASK, NUMBERS, "[%d]", 20, problem) for problem in range(5)]
    assert len(set(numbers)) > 1, "seeds make games"


def test_what_is_drawn_later_follows_from_the_key_and_from_no_neighbour():
    moves = ["[up]", "[left]", "[down]", "[right]"] * 3
    alone = [played(TASK, DRAWING, moves, sample=sample) for sample in range(3)]
    assert played_by_turns(TASK, DRAWING, [moves] * 3, 0, [0, 1, 2]) == alone
    assert alone[0][0] == alone[1][0], "a group begins alike"
    assert alone[0] != alone[1], "and goes on with numbers of its own"


def test_brackets_are_added_where_they_are_asked_for():
    assert "invalid" in played(TASK, NUMBERS, ["99"])[-1].content
    assert "format" in played(TASK, NUMBERS, ["99"])[-1].content
    assert "outside the range" in played(TASK, NUMBERS | {"brackets": True}, ["99"])[-1].content


def test_a_wrong_game_or_number_of_players_is_named():
    with pytest.raises(ValueError, match="Go-v9-raw not found"):
        load_task(TASK, {"game": "Go-v9"}).environment()
    task = load_task(TASK, NIM | {"players": 3})
    with pytest.raises(AssertionError, match="has to be 2, received 3"):
        task.environment().reset(task.problems("train")[0], EnvironmentKey(0, 0, 0, 0, 0))


def test_a_run_of_one_player_is_exact_and_can_be_read_again(tmp_path):
    lines = trained(tmp_path, TASK, NUMBERS | {"brackets": True})
    assert max(len(line["turn_rewards"]) for line in lines) > 1
    assert len({line["reward"] for line in lines}) > 2, "the steps have a gradient"


def test_a_run_by_self_play_is_exact_and_can_be_read_again(tmp_path):
    lines = trained(tmp_path, TASK, {"game": "TicTacToe-v0", "players": 2, "chat": False, "brackets": True})
    assert {line["reward"] for line in lines} >= {-1.0, 1.0}
    assert any(line["turn_rewards"] for line in lines if line["prompt"] % 2), "the second player had turns"
