"""Games of TextArena (https://github.com/LeonGuertler/TextArena), 0.7: of one player, or by self-play.

    [task]
    name = "zerokl.integrations.environments.textarena:TextArena"
    options = { game = "Nim-v0", players = 2 }

Each player reads what the game and the others have said since its last move, a line each, as TextArena's own
wrapper for language models writes it: `[GAME] ...`, `[Player 1] ...`. Its own moves are not repeated, because
they stand in its trajectory. The rewards are the game's, at its end.
"""

from ...engine.tasks.environment import EnvironmentKey, Observation
from ...engine.tasks.problem import Problem
from .seeded import OwnGenerators, check_installed, seeded_problems


class TextArenaEnvironment:
    """One game."""

    def __init__(self, game: str, players: int, brackets: bool, chat: bool):
        import textarena

        self.players = players
        self._generators, self._line_end = OwnGenerators(), "" if chat else "\n"
        self._own_moves = textarena.ObservationType.PLAYER_ACTION
        with self._generators.installed():
            self._game = textarena.make(f"{game}-raw")
        if brackets:
            self._game = textarena.wrappers.ActionFormattingWrapper(self._game)

    def reset(self, problem: Problem, key: EnvironmentKey) -> Observation:
        """What the first player reads."""
        with self._generators.installed():
            self._game.reset(num_players=self.players, seed=int(problem.answer))
        self._generators.seed(key)
        return self._next()

    def step(self, ids: list[int], text: str) -> Observation:
        """What the next player reads; at the end, the rewards. An invalid move is answered by the game."""
        with self._generators.installed():
            done, _ = self._game.step(action=text)
        if not done:
            return self._next()
        rewards = self._game.close()[0]
        numbers = [float(rewards.get(player, 0.0)) for player in range(self.players)]
        return Observation(reward=numbers if self.players > 1 else numbers[0], done=True)

    def _next(self) -> Observation:
        """What has been said to the player who moves next, since its last move."""
        with self._generators.installed():
            player, messages = self._game.get_observation()
        names = self._game.state.role_mapping
        lines = [
            f"[{names.get(sender, f'Player {sender}')}] {message}"
            for sender, message, kind in messages
            if sender != player or kind is not self._own_moves
        ]
        return Observation(self._line_end + "\n".join(lines) + self._line_end, player=player)


class TextArena:
    """A game of TextArena, begun from seeds.

    game: its name, without an ending such as -raw. players: that the model plays. brackets: whether a move
    without square brackets gets them, as TextArena's ActionFormattingWrapper does. chat: whether what is said
    goes through the chat template. train, held_out: numbers of seeds, counted from `seed`.

    Raises ValueError where TextArena is not installed, and for numbers out of range. A game that it does not
    have is refused when the first environment is made.
    """

    def __init__(
        self,
        game: str = "",
        players: int = 1,
        brackets: bool = False,
        chat: bool = True,
        train: int = 512,
        held_out: int = 64,
        seed: int = 0,
    ):
        check_installed("textarena", "textarena", "pip install 'textarena>=0.7.4,<0.8'")
        if not game:
            raise ValueError('task textarena: needs a game; set task.options = { game = "TowerOfHanoi-v0" }')
        self.chat, self._options = chat, (game, players, brackets, chat)
        self._splits = seeded_problems("textarena", game, train, held_out, seed)

    def problems(self, split: str) -> list[Problem]:
        return self._splits[split]

    def environment(self) -> TextArenaEnvironment:
        return TextArenaEnvironment(*self._options)
