"""Guessed tokens inside vLLM (vllm.speculate): the native sampler's guesses, and our draw at each of them.

vLLM's runner asks a class of the user's for guesses (v1/spec_decode/custom_class_proposer.py), and computes a
row for a request's last token and one for each guess after it. Beside guesses it refuses logits processors of
the user's (v1/sample/logits_processor/__init__.py). So our decoder draws when it has computed logits. Each
row takes the number of its own place, and keeps one finite number: the log-probability of the drawn token
(draw.py).

For vLLM every request is greedy. There its rejection sampler (v1/sample/rejection_sampler.py) uses no chance:
it goes on while a guess is the largest logit of its row, and that is the token that was drawn. A token that
was not drawn would have a log-probability of -inf, which KeyedSampler refuses.

vLLM cuts guesses at its limits, and fills some rows with guesses of its own: the id -1 where it begins a
request, and 0 near the end of its context. What is counted here decides speed only, as in ../speculation.py.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..guesser import TextGuesser
from ..speculation import SampleGuesses, Speculation
from ..types import DrawParams, Request
from .draw import EXTRA, Row, draw_rows, row_of
from .experts import NamesExperts


class ProposesTokens(NamesExperts):
    """Methods that vLLM adds to its worker, for LLM.collective_rpc."""

    def zerokl_guess(self) -> None:
        """Guess, and let our decoder draw, from the next forward on."""
        self.model_runner.drafter.begin(self.model_runner)

    def zerokl_guess_counts(self) -> dict[str, int]:
        """The guesses since the last call, and those of them that were drawn."""
        counts, self.model_runner.drafter.counts = self.model_runner.drafter.counts, Counter()
        return dict(counts)


@dataclass
class _Going:
    """A request that vLLM has begun."""

    row: Row
    guesses: SampleGuesses


class Proposer:
    """Whom vLLM asks for guesses, and who draws. vllm_config: vLLM's own.

    counts: of guesses, and of those that were drawn, since they were taken.
    """

    def __init__(self, vllm_config: Any):
        self._k = vllm_config.speculative_config.num_speculative_tokens
        self._going: dict[str, _Going] = {}
        self.counts: Counter[str] = Counter()

    def load_model(self, model: torch.nn.Module) -> None:
        """vLLM's runner for CPUs calls it. Nothing is loaded."""

    def begin(self, runner: Any) -> None:
        """runner: vLLM's GPUModelRunner, whose batch says what a row is. Its model draws from now on."""
        self._runner, model = runner, runner.get_model()
        self.speculation = Speculation(TextGuesser(), self._k, model.zerokl_config.vocab_size, runner.device)
        model.proposer = self

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw from logits [R, V] fp32, in place: the rows of one request after those of another."""
        rows = []
        for name, guess in self._guessed():
            row = self._of(name).row
            rows += [row, *(replace(row, ahead=i) for i in range(1, len(guess) + 1))]
        return draw_rows(logits, rows)

    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        """The next guesses of each request. sampled_token_ids: what each drew; none within its prompt."""
        for name in self._going.keys() - self._runner.requests.keys():
            self._going.pop(name).guesses.ended()
        next_guesses, n = [], len(sampled_token_ids)
        for (name, guess), tokens in zip(self._guessed(), sampled_token_ids, strict=True):
            guesses = self._of(name).guesses
            if tokens and guess and guess[0] >= 0:
                guesses.count(len(tokens) - 1, len(guess))
                self.counts["guesses"] += len(guess)
                self.counts["guesses_drawn"] += len(tokens) - 1
            next_guesses.append(guesses.next(n) if tokens else [])
        return next_guesses

    def _guessed(self) -> list[tuple[str, list[int]]]:
        """Of each request of the forward its name, and its guesses there."""
        batch = self._runner.input_batch
        return [*zip(batch.req_ids, batch.spec_token_ids[: batch.num_reqs], strict=True)]

    def _of(self, name: str) -> _Going:
        state, going = self._runner.requests[name], self._going.get(name)
        if going is None or going.row.output is not state.output_token_ids:
            going = self._going[name] = self._begun(state)
        return going

    def _begun(self, state: Any) -> _Going:
        """state: vLLM's CachedRequestState. Its list of drawn tokens grows."""
        params, row = state.sampling_params, row_of(state.sampling_params, state.output_token_ids)
        request = Request(
            tuple(state.prompt_token_ids),
            row.rng_key,
            DrawParams(row.sampling_params, frozenset(params.stop_token_ids)),
            params.max_tokens,
            row.drawn_before,
            params.extra_args[EXTRA]["trajectory_tokens"],
        )
        return _Going(row, self.speculation.begin(request, row.output))
