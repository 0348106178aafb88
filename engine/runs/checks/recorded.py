"""Environments as a run has recorded them: a replay takes their answers from rollouts.jsonl."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...config.run_config import Config
from ...tasks.environment import TIME_LIMIT, VOID, EnvironmentTask
from ...tasks.environments import AboutEnvironments, Answer, Failure, Game
from ...tasks.guard import guarded
from ..folder import ROLLOUTS
from ..logs import read_log
from ..rollout_lines import parse_rollout


class RecordedEnvironments:
    """Answers with what the environments of a run answered in each step of training, turn by turn.

    To a turn that is another than the run's it answers the same. The ledger then shows the difference.
    """

    def __init__(self, path: Path, task: EnvironmentTask, config: Config):
        lines_per_step = config.prompts * config.rollouts_per_prompt
        self._log = read_log(path / ROLLOUTS, lines_per_step, may_begin_later=True)
        self._step, self._rows = -1, {}
        self._asked: list[Game] = []
        is_binary = getattr(task, "binary", False) is True
        self.about = AboutEnvironments(players=1, binary=is_binary, tools=None, tool_calls="")

    def ask(self, game: Game) -> None:
        """Note a game whose next answer is wanted."""
        self._asked.append(game)

    def answers(self, wait: bool) -> list[tuple[Game, Answer | Failure]]:
        """The answers of all games that were asked for."""
        games, self._asked = self._asked, []
        return [(game, self._answer(game)) for game in games]

    def close_games(self) -> None:
        """There is none."""

    def _answer(self, game: Game) -> Answer | Failure:
        if game.key.step != self._step:
            rows = map(parse_rollout, self._log.lines(game.key.step))
            self._step = game.key.step
            self._rows = {(row["prompt"], row["sample"]): row for row in rows}
        row, turn = self._rows[game.key.prompt, game.key.sample], len(game.turns)
        ids, rewards = [*row["prompt_ids"], *row["completion_ids"]], row["turn_rewards"]
        starts = row.get("turn_starts", [len(row["prompt_ids"])])
        if turn < len(starts):
            return Answer(ids[_end(row, turn) : starts[turn]], _reward(rewards, turn), "", 0)
        if row["finish"] in VOID:
            return Failure(row["error"], row["finish"] == TIME_LIMIT)
        return Answer([], _reward(rewards, turn) if rewards else [row["reward"]], row["finish"], 0)


def _reward(rewards: Sequence[float], turn: int) -> list[float]:
    """What came after turn number `turn`; turn 0 is the beginning."""
    return [rewards[turn - 1] if 0 < turn <= len(rewards) else 0.0]


def _end(row: dict[str, Any], turn: int) -> int:
    """The place after the last token of turn number `turn`, in all ids; turn 0 ends at 0."""
    if turn == 0:
        return 0
    before, starts = len(row["prompt_ids"]), row["turn_starts"]
    place, limit = starts[turn - 1] - before, starts[turn] - before
    while place < limit and row["mask"][place]:
        place += 1
    return place + before


def can_be_recorded(task: Any, max_resamples: int) -> bool:
    """Whether the log of a run has all that its environments answered.

    It lacks who moved when in a game, and the groups that dynamic sampling left out.
    """
    if not isinstance(task, EnvironmentTask) or max_resamples > 1:
        return False
    return getattr(guarded("environment:", task.environment, may_draw=True), "players", 1) == 1
