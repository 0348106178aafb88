"""One vLLM engine that guesses, in a process of its own, beside the native sampler, which does not.

Not a test: a script of test_guesses.py. It reads a JSON request. For each case it prints the trajectories,
those of them that differ, the guesses, and those of them that were drawn; or how the call ended.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from zerokl.engine.config.vllm_section import VllmConfig
from zerokl.engine.rollout import speculation
from zerokl.engine.rollout.guesser import Guesser, TextGuesser
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import GenerationParams, RngKey, Rollout, Sampler, complete, draw
from zerokl.engine.rollout.vllm.sampler import VllmZeroklSampler
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import load_decoder

sys.path.append(str(Path(__file__).parents[1]))
import guessers
from trajectories import in_three_turns

Play = Callable[..., list[Rollout]]
KEY, STOPS = RngKey(3, 4), frozenset({0, 1, 2})


class GoesOn(guessers.Oracle):
    """Guesses what is drawn, and goes on after the end with a stop id."""

    def propose(self, request, tokens, k):
        return [*super().propose(request, tokens, k), *[0] * k][:k]


def bits(rollouts: Sequence[Rollout]) -> list[tuple]:
    return [
        (r.ids, r.drawn.tobytes(), r.logprobs.tobytes(), r.turn_starts, r.finish)
        + (() if r.experts is None else (r.experts.tobytes(), r.experts.shape, str(r.experts.dtype)))
        for r in rollouts
    ]


def with_noise(sampler: Sampler, prompts: list, params: GenerationParams, key: RngKey) -> list[Rollout]:
    requests = params.requests(prompts, key)
    noisy = requests[0].draw_params._replace(logit_noise=0.5)
    return draw(sampler, [replace(request, draw_params=noisy) for request in requests])


def made(name: str, expected: Sequence[Rollout], vocab: int) -> Guesser:
    numbers = np.random.default_rng(1)
    oracle = partial(guessers.Oracle, expected, vocab=vocab)
    return {
        "texts": TextGuesser,
        "right": oracle,
        "right, and on": partial(GoesOn, expected),
        "wrong": lambda: oracle(lambda n: True),
        "mostly right": lambda: oracle(lambda n: numbers.random() < 0.2),
        "hostile": lambda: guessers.Guesser(guessers.hostile(1, vocab)),
    }[name]()


PLAYS: dict[str, Play] = {
    "one turn": complete,
    "three turns": partial(in_three_turns, at_any_time=True),
    "noise": with_noise,
}


class Side:
    """vLLM and the native sampler over one decoder."""

    def __init__(self, request: dict):
        decoder = load_decoder(Path(request["model"]), getattr(torch, request["dtype"]))
        self.vocab = decoder.config.vocab_size
        cfg = VllmConfig(**request["vllm"])
        self.vllm = VllmZeroklSampler(Path(request["model"]), decoder.config, decoder.flat, cfg)
        (self.proposer,) = self.vllm.llm.apply_model(lambda model: model.proposer)
        self.native, self.prompts = NativeSampler(decoder), request["prompts"]

    def compare(self, case: dict) -> list[int] | str:
        """Trajectories, those that differ, guesses, and those that were drawn, of a case."""
        play = PLAYS[case.get("play", "one turn")]
        params = GenerationParams(
            SamplingParams.of(*case.get("sampling_params", [])),
            2,
            24,
            STOPS,
            experts=case.get("experts", False),
        )
        expected = play(self.native, self.prompts, params, KEY)
        self.proposer.speculation.guesser = made(case["guesser"], expected, self.vocab)
        differ, counts = 0, Counter()
        self.vllm.stopwatch.counts = counts
        with ExitStack() as patches:
            for name in case.get("patches", ()):
                patches.enter_context(patch(*PATCHES[name]))
            for _ in range(1 + (case["guesser"] == "texts")):  # the second time it knows the texts
                try:
                    drawn = play(self.vllm, self.prompts, params, KEY)
                except FloatingPointError as error:
                    return str(error)
                differ += sum(a != b for a, b in zip(bits(drawn), bits(expected), strict=True))
                counts["tokens"] -= sum(len(r.logprobs) for r in drawn)
        assert counts["tokens"] == 0
        return [len(expected), differ, counts["guesses"], counts["guesses_drawn"]]


def unfiltered(guesses: speculation.SampleGuesses, n: int) -> Sequence[int]:
    common = guesses._speculation
    return common.guesser.propose(guesses._request, guesses._tokens, common.k)


def all_accepted(drafts, lengths, longest, ends, probs, logits, bonus, *_, **__) -> torch.Tensor:
    taken = torch.full((len(lengths), longest + 1), -1, dtype=torch.int32)
    for i, part in enumerate(drafts.split(lengths)):
        taken[i, : len(part)], taken[i, len(part)] = part, bonus[i, 0]
    return taken


PATCHES = {
    "no filter": ("zerokl.engine.rollout.speculation.SampleGuesses.next", unfiltered),
    # vLLM takes every guess.
    "all accepted": ("vllm.v1.sample.rejection_sampler.rejection_sample", all_accepted),
    # All rows of a request in a forward take one number of its key.
    "one number": (
        "zerokl.engine.rollout.vllm.draw.Row.drawn",
        property(lambda row: row.drawn_before + len(row.output)),
    ),
}


def main() -> None:
    request = json.load(sys.stdin)
    # Every guess is worth it, so that a guesser that is always wrong is asked in every turn.
    speculation._Chance.worth = lambda chance, least: 1 << 20
    side = Side(request)
    results = [side.compare(case) for case in request["cases"]]
    metrics = {m.name: m.value for m in side.vllm.llm.get_metrics() if hasattr(m, "value")}
    print("REPORT", json.dumps({"results": results, "metrics": metrics}), flush=True)
    os._exit(0)  # vLLM's threads would keep the process for seconds


if __name__ == "__main__":
    main()
