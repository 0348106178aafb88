"""Plays reasonings that are cut at budgets: the model draws one, and then short answers after each cut.

    prompt | reasoning, drawn                             a rollout, trained on
    prompt | its first b_j tokens | prefix | answer       a rollout for each answer; only the answer is drawn

A reasoning ends with a stop token, with the first token of the prefix, or at the last budget. Where it ended
with the first token of the prefix, the rest of the prefix follows, and after any other cut all of it. A
reasoning that ended before a budget is cut at its end, and answered for this budget as for any other.

Each answer is a request of its own, with the sample number of config/budget_cuts.py in its key. So it has
its own random numbers, and whoever serves it, in whichever call, draws the same tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..config.budget_cuts import Cuts
from ..tasks.base import Problem
from ..tasks.rewards import Reward
from ..tasks.tokenizer import Tokenizer
from .episodes import Checked, CompletionPlayer, Episodes, longest
from .stopwatch import Stopwatch
from .types import (
    DrawParams,
    GenerationParams,
    Request,
    RngKey,
    Rollout,
    Sampler,
    check_room,
    complete,
    draw,
)


class DrawnAnswers(NamedTuple):
    """How reasonings are cut and answered.

    prefix: stands before an answer. max_tokens: of an answer at most. cuts: Cuts of so many reasonings.
    """

    prefix: str
    max_tokens: int
    cuts: Callable[[int], Cuts]


class BudgetPlayer(CompletionPlayer):
    """Draws reasonings and answers, and rewards the answers. Episodes.cuts says which is which.

    chat: see Tokenizer.encode. stopwatch: measures the rewards; None where nobody asks. Raises ValueError for
    a prefix without tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        reward: Reward,
        chat: bool,
        answers: DrawnAnswers,
        stopwatch: Stopwatch | None = None,
    ):
        super().__init__(tokenizer, reward, chat, stopwatch)
        self._answers = answers
        self._prefix = tokenizer.encode_completion(answers.prefix)
        self._answer_tokens = len(self._prefix) + answers.max_tokens

    @property
    def reasoning_ends(self) -> frozenset[int]:
        """The tokens that end a reasoning beside the stop tokens."""
        return frozenset(self._prefix[:1])

    def check(self, problems: Sequence[Problem], max_tokens: int, context: int) -> Checked:
        """max_tokens: of a reasoning, which is part of an answer's prompt."""
        self.reward.check_answers(problems)
        prompt_ids = [self._prompt(problem) for problem in problems]
        for ids, problem in zip(prompt_ids, problems, strict=True):
            if len(ids) + max_tokens + self._answer_tokens > context:
                raise ValueError(
                    f"task: the prompt of problem {problem.id} has {len(ids)} tokens; with a reasoning "
                    f"(sampling.max_tokens, {max_tokens}) and {self._answer_tokens} tokens of answer prefix "
                    f"and answer that is more than the model's context ({context}); shorten it or lower "
                    "sampling.max_tokens"
                )
        prompt_tokens = longest(prompt_ids) + max_tokens + self._answer_tokens
        return Checked(prompt_ids, prompt_tokens, max_tokens)

    def play(
        self,
        sampler: Sampler,
        problems: Sequence[Problem],
        generation_params: GenerationParams,
        rng_key: RngKey,
    ) -> Episodes:
        """At temperature 0 all answers of a cut are equal, and one of them is drawn."""
        cuts = self._answers.cuts(generation_params.num_generations)
        if not generation_params.sampling_params.temperature:
            cuts = cuts._replace(answers=1)
        check_room(len(problems) * cuts.rollouts, max(generation_params.max_tokens, self._answers.max_tokens))
        ends = generation_params.stop_ids | self.reasoning_ends
        with self._one_at_a_time:
            prompts = [self._prompt(problem) for problem in problems]
        reasonings = complete(sampler, prompts, replace(generation_params, stop_ids=ends), rng_key)
        requests = [
            request for r in reasonings for request in self._requests(r, cuts, generation_params, rng_key)
        ]
        answers = draw(sampler, requests)
        n, k = len(reasonings) // len(problems), len(answers) // len(problems)
        with self._one_at_a_time:
            thoughts = self._tokenizer.grouped_texts([r.completion_ids for r in reasonings], n)
            answered = self._tokenizer.grouped_texts([r.completion_ids for r in answers], k)
            with self._station("time/reward_s"):
                rewards = self.reward.values(problems, answered)
        rollouts = [
            rollout
            for p in range(len(problems))
            for rollout in (*reasonings[p * n : (p + 1) * n], *answers[p * k : (p + 1) * k])
        ]
        return Episodes(
            list(problems),
            rollouts,
            [t + a for t, a in zip(thoughts, answered, strict=True)],
            cuts.with_reasonings(rewards),
            self.binary,
            cuts=cuts,
        )

    def _requests(
        self, reasoning: Rollout, cuts: Cuts, params: GenerationParams, rng_key: RngKey
    ) -> Iterator[Request]:
        """Those of the answers to a reasoning, cut by cut."""
        draw_params = DrawParams(params.sampling_params, params.stop_ids, experts=params.experts)
        for j, budget in enumerate(cuts.budgets):
            cut = reasoning.completion_ids[:budget]
            rest = self._prefix[1:] if cut[-1] == self._prefix[0] else self._prefix
            ids = (*reasoning.prompt_ids, *cut, *rest)
            for k in range(cuts.answers):
                sample = cuts.sample(reasoning.sample, j, k)
                key = replace(rng_key, prompt=reasoning.prompt, sample=sample)
                yield Request(ids, key, draw_params, self._answers.max_tokens)
