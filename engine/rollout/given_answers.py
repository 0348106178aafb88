"""Plays reasonings: the model draws one, and the trainer's own forward scores the reference answer after it.

    prompt | reasoning, drawn | answer prefix | reference answer and a stop token, given
             trained on         not trained     trained on

A reasoning ends with a stop token, with the first token of the prefix, or at max_tokens. Where the model drew
the prefix's first token, the rest of the prefix follows, and else all of it. So the prefix should begin with
a token that ends a thought, such as </think>.

The answer counts as a second turn, and its tokens count as drawn: they are trained on, and their
log-probabilities are compared with those of the training pass. These are scores with the weights of the step
(ScoringSampler); those of the reasoning are the sampler's.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...kernels.sampling_params import SamplingParams
from ..tasks.base import Problem
from ..tasks.tokenizer import Tokenizer
from .episodes import Checked, EpisodePlayer, Episodes, longest
from .scoring_sampler import ScoringSampler
from .types import Completion, GenerationParams, RngKey, Rollout, complete


class GivenAnswers(NamedTuple):
    """How reference answers are put after reasonings. sampling_params: of the answers' log-probabilities."""

    prefix: str
    sampling_params: SamplingParams


class AnswerPlayer(EpisodePlayer):
    """Draws reasonings, and rewards each with the probability of its problem's answer after it.

    chat: see Tokenizer.encode. Raises ValueError for a prefix without tokens.
    """

    binary = rewards_by_tokens = False

    def __init__(self, tokenizer: Tokenizer, chat: bool, answers: GivenAnswers):
        self._tokenizer, self._chat, self._answers = tokenizer, chat, answers
        self._prefix = tokenizer.encode_completion(answers.prefix)

    def check(self, problems: Sequence[Problem], max_tokens: int, context: int) -> Checked:
        """max_tokens: of a reasoning."""
        prompt_ids, answer_tokens = [], 0
        for problem in problems:
            prompt, answer = self._prompt(problem), self._answer(problem)
            given = len(self._prefix) + len(answer)
            if len(prompt) + max_tokens + given > context:
                raise ValueError(
                    f"task: problem {problem.id} has {len(prompt)} tokens, and {given} of answer prefix and "
                    f"answer; with sampling.max_tokens ({max_tokens}) that is more than the model's context "
                    f"({context}); shorten it or lower sampling.max_tokens"
                )
            prompt_ids.append(prompt)
            answer_tokens = max(answer_tokens, given)
        prompt_tokens = longest(prompt_ids)
        return Checked(prompt_ids, prompt_tokens, max_tokens, prompt_tokens + max_tokens + answer_tokens)

    def play(
        self,
        sampler: ScoringSampler,
        problems: Sequence[Problem],
        generation_params: GenerationParams,
        rng_key: RngKey,
    ) -> Episodes:
        """The rewards are R = pi(answer | prompt, reasoning)."""
        G, stop_ids = generation_params.num_generations, generation_params.stop_ids | {self._prefix[0]}
        prompts = [self._prompt(problem) for problem in problems]
        reasonings = complete(sampler, prompts, replace(generation_params, stop_ids=stop_ids), rng_key)
        answers = [tuple(self._answer(problem)) for problem in problems for _ in range(G)]
        between = [self._rest_of_prefix(reasoning) for reasoning in reasonings]
        drafts = [
            Rollout.of_one_turn(r.prompt, r.sample, (*r.ids, *ids), answer, np.zeros(len(answer)), "stop", 0)
            for r, ids, answer in zip(reasonings, between, answers, strict=True)
        ]
        scores = sampler.score(drafts, self._answers.sampling_params)
        rollouts = [
            r.with_turn(ids, Completion(answer, logp, "stop", r.weight_version))
            for r, ids, answer, logp in zip(reasonings, between, answers, scores, strict=True)
        ]
        texts = self._tokenizer.grouped_texts([r.completion_ids for r in rollouts], G)
        rewards = np.array([math.exp(math.fsum(logp.tolist())) for logp in scores]).reshape(-1, G)
        return Episodes(list(problems), rollouts, texts, rewards, self.binary)

    def _rest_of_prefix(self, reasoning: Rollout) -> list[int]:
        return self._prefix[1:] if reasoning.ids[-1] == self._prefix[0] else self._prefix

    def _prompt(self, problem: Problem) -> list[int]:
        return self._tokenizer.encode(problem.prompt, self._chat, problem.system)

    def _answer(self, problem: Problem) -> list[int]:
        return self._tokenizer.encode_answer(str(problem.answer))


def answer_length(rollout: Rollout) -> int:
    """The tokens of the answer of a rollout that an AnswerPlayer has played."""
    return int(rollout.drawn[rollout.turn_starts[-1] :].sum())
