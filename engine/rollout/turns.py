"""Trajectories of many turns: the model draws, its environment answers, and the ids go on.

While the model draws turns of some trajectories, the environments of others answer side by side. As soon as
one has answered, the sampler takes the next turn of its trajectory, if it takes requests while it draws
(ContinuousSampler). Otherwise all turns that can be drawn are drawn together. Each trajectory draws with its
own key, and each environment has its own; so it decides nothing which of them run together.

How a trajectory ends, its loss and its reward:

    done        the environment says so                          trained on; the sum of its turns' rewards
    turns       max_turns turns are drawn                        the same
    tokens      a turn was cut before its stop token, or the     the same; the environment does not see the
                trajectory has no token left                     cut turn, whose reward is 0
    context     the next turn has no room in the context         as tokens
    time limit  the environment took too long                    not trained on; counts in no group's mean
    error       the environment failed, or its content has no    the same
                place in the chat template

In a game the trajectories of all players end together, in the same way.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import NamedTuple

import numpy as np

from ...files.reading import shown
from ..tasks.base import Problem
from ..tasks.environment import CONTEXT, ERROR, TIME_LIMIT, TOKENS, TURNS, EnvironmentKey, Turn
from ..tasks.environments import Answer, Environments, Failure, Game
from ..tasks.rendering import Renderer, Transcript
from ..tasks.tokenizer import Tokenizer
from ..tasks.tool_calls import ToolCalls, parse_calls
from .episodes import Checked, EpisodePlayer, Episodes
from .stopwatch import Stopwatch
from .types import (
    Completion,
    ContinuousSampler,
    DrawParams,
    GenerationParams,
    Request,
    RngKey,
    Rollout,
    Sampler,
    check_room,
    serve_in_waves,
)


class TurnLimits(NamedTuple):
    """Of a trajectory. max_turns: of a player. max_tokens: drawn ones. context: all tokens."""

    max_turns: int
    max_tokens: int
    context: int


@dataclass
class _Trajectory:
    """What one player has seen and drawn so far."""

    rng_key: RngKey
    ids: list[int] = field(default_factory=list)
    rollout: Rollout | None = None
    transcript: Transcript | None = None
    turn_rewards: list[float] = field(default_factory=list)
    early_reward: float = 0.0  # what came before its first turn, to whose reward it is added

    @property
    def turns(self) -> int:
        return self.rollout.turns if self.rollout else 0

    @property
    def drawn(self) -> int:
        return len(self.rollout.logprobs) if self.rollout else 0

    @property
    def reward(self) -> float:
        return math.fsum(self.turn_rewards) if self.turn_rewards else self.early_reward

    def draw(self, completion: Completion) -> None:
        """Take the tokens of a turn."""
        key, r = self.rng_key, self.rollout
        if r is None:
            self.rollout = Rollout.of_one_turn(
                key.prompt,
                key.sample,
                self.ids,
                completion.ids,
                completion.logprobs,
                completion.finish,
                completion.weight_version,
            )
        else:
            self.rollout = r.with_turn(self.ids[len(r.ids) :], completion)
        self.ids = list(self.rollout.ids)
        self.turn_rewards.append(0.0 if self.turn_rewards else self.early_reward)

    def ended(self, finish: str, version: int) -> Rollout:
        """The rollout; without a drawn token where the player had no turn."""
        if self.rollout is not None:
            return replace(self.rollout, finish=finish).check()
        key, ids = self.rng_key, tuple(self.ids)
        nothing = np.zeros(len(ids), bool), np.zeros(0, np.float32)
        return Rollout(key.prompt, key.sample, ids, *nothing, (), finish, version)


@dataclass
class _Play:
    """A game with the trajectories of its players; or one trajectory."""

    game: Game
    players: list[_Trajectory]
    player: int = 0  # who moves
    finish: str = ""
    error: str = ""


class TurnPlayer(EpisodePlayer):
    """Plays the trajectories of a run in its environments.

    renderer: makes ids of their contents. say: shows a line for a trajectory that ended in an error.
    stopwatch: measures the environments; None where nobody asks.

    Raises ValueError for tool calls that the tokenizer cannot read.
    """

    plays_by_place = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        environments: Environments,
        renderer: Renderer,
        limits: TurnLimits,
        say: Callable[[str], None],
        stopwatch: Stopwatch | None = None,
    ):
        self._tokenizer, self.environments, self._renderer = tokenizer, environments, renderer
        self._limits, self._say = limits, say
        self.station = stopwatch.station if stopwatch else nullcontext
        self.players, self.binary = environments.about.players, environments.about.binary
        # Steps may be played side by side (train/ahead.py), and the environments play one of them at a time.
        self._one_at_a_time = Lock()
        if environments.about.tool_calls == "template" and not tokenizer.has_response_template:
            raise ValueError(
                'environment: tool_calls = "template" needs a tokenizer with a response_template; it can be '
                '"json" or "xml"'
            )

    def check(self, problems: Sequence[Problem], max_tokens: int, context: int) -> Checked:
        """No prompt is known before its environment is played."""
        return Checked([], 0, self._limits.max_tokens, self._limits.context)

    def play(
        self,
        sampler: Sampler,
        problems: Sequence[Problem],
        generation_params: GenerationParams,
        rng_key: RngKey,
    ) -> Episodes:
        """Trajectories of the problems. The prompt of a problem's player has place p * players + player."""
        G, n = generation_params.num_generations, self.players
        check_room(len(problems) * n * G, self._limits.max_tokens)
        plays = [self._begun(problems[p], p, g, rng_key) for p in range(len(problems)) for g in range(G)]
        with self._one_at_a_time:
            turns = _Turns(self, plays, generation_params)
            if isinstance(sampler, ContinuousSampler):
                sampler.serve(turns)
            else:
                serve_in_waves(sampler, turns)
            sampler.end_turns()
            self.environments.close_games()
            return self._episodes(problems, plays, G, turns.version)

    def _begun(self, problem: Problem, p: int, g: int, rng_key: RngKey) -> _Play:
        first = rng_key.prompt + p * self.players
        key = EnvironmentKey(rng_key.seed, rng_key.step, int(rng_key.stream), first, g)
        keys = [replace(rng_key, prompt=first + player, sample=g) for player in range(self.players)]
        return _Play(Game(problem, key), [_Trajectory(key) for key in keys])

    def request(self, play: _Play, params: GenerationParams) -> Request:
        """The next turn of whoever moves."""
        trajectory = play.players[play.player]
        limits = self._limits
        left = limits.max_tokens - trajectory.drawn, limits.context - len(trajectory.ids)
        max_tokens = min(params.max_tokens, *left)
        is_last = trajectory.turns + 1 == limits.max_turns or max_tokens in left
        return Request(
            tuple(trajectory.ids),
            trajectory.rng_key,
            DrawParams(params.sampling_params, params.stop_ids, experts=params.experts),
            max_tokens,
            trajectory.drawn,
            0 if is_last else limits.context,
        )

    def drawn(self, play: _Play, request: Request, completion: Completion) -> None:
        """Take a turn. One that was cut ends the game."""
        trajectory = play.players[play.player]
        trajectory.draw(completion)
        if completion.finish == "length":
            cut_by_context = len(request.ids) + request.max_tokens == self._limits.context
            play.finish = CONTEXT if cut_by_context else TOKENS
            return
        ids = list(completion.ids)
        text = self._tokenizer.text(ids[:-1])
        play.game.turns.append(Turn(ids, text, self._calls(request.ids, ids, text)))

    def _calls(self, before: Sequence[int], ids: Sequence[int], text: str) -> ToolCalls | None:
        """The tool calls in a turn, where the environment asks for them."""
        form = self.environments.about.tool_calls
        if form == "template":
            return self._tokenizer.tool_calls(before, ids, self.environments.about.tools)
        return parse_calls(text, form) if form else None

    def answered(self, play: _Play, answer: Answer | Failure) -> None:
        """Take what an environment has answered, and add its content to the ids of whoever moves next."""
        if isinstance(answer, Failure):
            self._fail(play, answer.reason, TIME_LIMIT if answer.timed_out else ERROR)
            return
        play.game.answered(answer)
        for trajectory, reward in zip(play.players, answer.rewards, strict=True):
            if trajectory.turn_rewards:
                trajectory.turn_rewards[-1] += reward
            else:
                trajectory.early_reward += reward
        play.player = answer.player
        trajectory, limits = play.players[play.player], self._limits
        if answer.end:
            play.finish = answer.end
        elif trajectory.turns == limits.max_turns:
            play.finish = TURNS
        elif trajectory.drawn >= limits.max_tokens:
            play.finish = TOKENS
        else:
            self._render(play, trajectory, answer)

    def _render(self, play: _Play, trajectory: _Trajectory, answer: Answer) -> None:
        """The ids of a content, after those of the trajectory."""
        try:
            if trajectory.transcript is None:
                trajectory.transcript, ids = self._renderer.begin(answer.content)
                if not ids:
                    raise ValueError("environment: its first content is empty")
            else:
                last = trajectory.ids[-1]
                ids = self._renderer.follow(trajectory.transcript, answer.content, trajectory.turns, last)
        except ValueError as error:
            self._fail(play, str(error), ERROR)
            return
        trajectory.ids += ids
        if len(trajectory.ids) >= self._limits.context:
            play.finish = CONTEXT

    def _fail(self, play: _Play, reason: str, finish: str) -> None:
        play.finish, play.error, game = finish, reason, play.game
        place = f"problem {game.problem.id} ({shown(game.problem.prompt)}), sample {game.key.sample}"
        self._say(f"environment: {reason} for {place}, turn {len(game.turns)}; not trained on")

    def _episodes(
        self, problems: Sequence[Problem], plays: Sequence[_Play], G: int, version: int
    ) -> Episodes:
        """The trajectories in canonical order: problem, player, sample."""
        P, n = len(problems), self.players
        order = [(plays[p * G + g], player) for p in range(P) for player in range(n) for g in range(G)]
        rollouts = [play.players[player].ended(play.finish, version) for play, player in order]
        return Episodes(
            [problem for problem in problems for _ in range(n)],
            rollouts,
            self._tokenizer.grouped_texts([r.completion_ids for r in rollouts], G),
            np.array([play.players[player].reward for play, player in order]).reshape(P * n, G),
            self.binary,
            [play.players[player].turn_rewards for play, player in order],
            [play.error for play, _ in order],
        )


class _Turns:
    """The turns of all trajectories, as a sampler asks for them. A place is that of a game in `plays`."""

    def __init__(self, player: TurnPlayer, plays: Sequence[_Play], params: GenerationParams):
        self._player, self._plays, self._params = player, plays, params
        self._places = {id(play.game): place for place, play in enumerate(plays)}
        self._requests: dict[int, Request] = {}  # the open one of each place
        self._ready: list[int] = []
        self.version = -1  # of the weights that drew the turns
        self._answering = 0
        for play in plays:
            self._ask(play)

    def _ask(self, play: _Play) -> None:
        self._answering += 1
        self._player.environments.ask(play.game)

    def ready(self, at_least: float) -> list[tuple[int, Request]]:
        """They come in the order of the places, so that equal prompts stand side by side."""
        if self._answering and not at_least:
            self._collect(wait=False)
        with self._player.station("time/environment_s") if at_least else nullcontext():
            while self._answering and len(self._ready) < at_least:
                self._collect(wait=True)
        places, self._ready = sorted(self._ready), []
        return [(place, self._requests[place]) for place in places]

    def _collect(self, wait: bool) -> None:
        for game, answer in self._player.environments.answers(wait):
            self._take(self._places[id(game)], answer)

    def _take(self, place: int, answer: Answer | Failure) -> None:
        play = self._plays[place]
        self._answering -= 1
        self._player.answered(play, answer)
        if not play.finish:
            self._requests[place] = self._player.request(play, self._params)
            self._ready.append(place)

    def completed(self, place: int, completion: Completion) -> None:
        """The environment begins to answer at once."""
        play, self.version = self._plays[place], completion.weight_version
        self._player.drawn(play, self._requests.pop(place), completion)
        if not play.finish:
            self._ask(play)
