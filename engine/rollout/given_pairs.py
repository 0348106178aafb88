"""Plays pairs: nobody draws, and the trainer's own forward scores the given completions.

A pair is played as two rollouts of one prompt, the chosen completion and the rejected one. Their tokens count
as drawn: they are trained on, and their log-probabilities are compared with those of the training pass. These
log-probabilities are scores with the weights of the step (ScoringSampler). So the comparison says that score
and training pass are one function of the weights, bit for bit. It says nothing of a sampler.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...kernels.sampling_params import SamplingParams
from ..tasks.base import Problem
from ..tasks.pairs import Pair
from ..tasks.tokenizer import Tokenizer
from .episodes import Checked, EpisodePlayer, Episodes, longest
from .scoring_sampler import ScoringSampler
from .types import GenerationParams, RngKey, Rollout


class PairPlayer(EpisodePlayer):
    """Scores both completions of each pair. chat: see Tokenizer.encode.

    The reward of both is 1 where the policy finds the chosen completion likelier than the rejected one, by
    the sums of their log-probabilities, and 0 where not. It is no part of the loss.
    """

    binary = True

    def __init__(self, tokenizer: Tokenizer, chat: bool):
        self._tokenizer, self._chat = tokenizer, chat

    def check(self, problems: Sequence[Problem], max_tokens: int, context: int) -> Checked:
        """A completion may have max_tokens tokens, its stop token included."""
        prompt_ids = []
        for pair in problems:
            prompt, *completions = self._ids(pair)
            prompt_ids.append(prompt)
            tokens = longest(completions)
            if tokens > max_tokens:
                raise ValueError(
                    f"task: a completion of pair {pair.id} has {tokens} tokens with its stop token, and "
                    f"sampling.max_tokens is {max_tokens}; shorten it or raise sampling.max_tokens"
                )
            if len(prompt) + tokens > context:
                raise ValueError(
                    f"task: pair {pair.id} has {len(prompt)} + {tokens} tokens, more than the model's "
                    f"context ({context}); shorten it"
                )
        return Checked(prompt_ids, longest(prompt_ids), max_tokens)

    def play(
        self,
        sampler: ScoringSampler,
        problems: Sequence[Problem],
        generation_params: GenerationParams,
        rng_key: RngKey,
    ) -> Episodes:
        """G is 2: the chosen completion, then the rejected one.

        The scores are those of the model's own softmax, at temperature 1, whatever generation_params say.
        """
        drafts = []
        for p, pair in enumerate(problems, rng_key.prompt):
            prompt, *completions = self._ids(pair)
            for sample, ids in enumerate(completions):
                unscored = np.zeros(len(ids), np.float32)
                drafts.append(Rollout.of_one_turn(p, sample, prompt, ids, unscored, "stop", sampler.version))
        scores = sampler.score(drafts, SamplingParams())
        rollouts = [replace(draft, logprobs=logp) for draft, logp in zip(drafts, scores, strict=True)]
        sums = [math.fsum(logp.tolist()) for logp in scores]
        is_ranked = [float(a > b) for a, b in zip(sums[::2], sums[1::2], strict=True)]
        texts = self._tokenizer.grouped_texts([r.completion_ids for r in rollouts], 2)
        rewards = np.array([[x, x] for x in is_ranked])
        return Episodes(list(problems), rollouts, texts, rewards, self.binary)

    def _ids(self, pair: Problem) -> tuple[list[int], list[int], list[int]]:
        """The ids of prompt, chosen and rejected completion. Raises ValueError for a text without ids."""
        assert isinstance(pair, Pair)
        prompt = self._tokenizer.encode(pair.prompt, self._chat, pair.system)
        return prompt, *map(self._tokenizer.encode_answer, (pair.answer, pair.rejected))
