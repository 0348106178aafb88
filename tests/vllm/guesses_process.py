"""One vLLM engine that guesses, in a process of its own, beside the native sampler, which does not.

Not a test: a script of test_guesses.py. It reads a JSON request. For each guesser it prints the trajectories
that were compared and those of them that differ, the guesses, and those of them that were drawn.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from zerokl.engine.config.vllm_section import VllmConfig
from zerokl.engine.rollout import speculation
from zerokl.engine.rollout.guesser import Guesser, TextGuesser
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.stopwatch import Stopwatch
from zerokl.engine.rollout.types import GenerationParams, RngKey, Rollout, Sampler, complete, draw
from zerokl.engine.rollout.vllm.sampler import VllmZeroklSampler
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import load_decoder

sys.path.append(str(Path(__file__).parents[1]))
import guessers
from trajectories import in_three_turns

Play = Callable[..., list[Rollout]]
KEY, STOPS = RngKey(3, 4), frozenset({0, 1, 2})


class Unfiltered(guessers.Oracle):
    """Guesses what is drawn, and goes on after the end with stop ids."""

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
        "unfiltered": partial(Unfiltered, expected),
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
        self.stopwatch, self.vocab = Stopwatch(decoder.device), decoder.config.vocab_size
        cfg = VllmConfig(**request["vllm"])
        self.vllm = VllmZeroklSampler(
            Path(request["model"]), decoder.config, decoder.flat, cfg, stopwatch=self.stopwatch
        )
        (self.guesses,) = self.vllm.llm.apply_model(lambda model: model.guesses)
        self.native, self.prompts = NativeSampler(decoder), request["prompts"]

    def compare(self, case: dict) -> list[int]:
        """Trajectories, those that differ, guesses, and those that were drawn, of a case."""
        play = PLAYS[case.get("play", "one turn")]
        params = GenerationParams(
            SamplingParams.of(*case.get("sampling_params", [])),
            2,
            20,
            STOPS,
            experts=case.get("experts", False),
        )
        expected = play(self.native, self.prompts, params, KEY)
        self.guesses.speculation.guesser = made(case["guesser"], expected, self.vocab)
        plain = speculation.SampleGuesses.next
        if case["guesser"] == "unfiltered":
            speculation.SampleGuesses.next = lambda sample, n: sample._speculation.guesser.propose(
                sample._request, sample._tokens, sample._speculation.k
            )
        differ, tokens, self.stopwatch.counts = 0, 0, Counter()
        for _ in range(1 + (case["guesser"] == "texts")):  # the second time it knows the texts
            drawn = play(self.vllm, self.prompts, params, KEY)
            tokens += sum(len(r.logprobs) for r in drawn)
            differ += sum(a != b for a, b in zip(bits(drawn), bits(expected), strict=True))
        speculation.SampleGuesses.next = plain
        counts = self.stopwatch.counts
        assert counts["tokens"] == tokens
        return [len(expected), differ, counts["guesses"], counts["guesses_drawn"]]


def accept_all() -> None:
    """vLLM takes every guess."""
    from vllm.v1.sample import rejection_sampler

    def all_of_them(drafts, lengths, longest, ends, probs, logits, bonus, *rest, **more):
        taken = torch.full((len(lengths), longest + 1), -1, dtype=torch.int32)
        for i, part in enumerate(drafts.split(lengths)):
            taken[i, : len(part)], taken[i, len(part)] = part, bonus[i, 0]
        return taken

    rejection_sampler.rejection_sample = all_of_them


def one_number() -> None:
    """All rows of a request in a forward take one number of its key."""
    from zerokl.engine.rollout.vllm import draw

    draw.Row.drawn = property(lambda row: row.drawn_before + len(row.output))


PLANTS = {"accept all": accept_all, "one number": one_number}


def main() -> None:
    request = json.load(sys.stdin)
    # Every guess is worth it, so that a guesser that is always wrong is asked in every turn.
    speculation._Chance.worth = lambda chance, least: 1 << 20
    side = Side(request)
    if request.get("plant"):
        PLANTS[request["plant"]]()
    results = [side.compare(case) for case in request["cases"]]
    metrics = {m.name: m.value for m in side.vllm.llm.get_metrics() if hasattr(m, "value")}
    print("REPORT", json.dumps({"results": results, "metrics": metrics}), flush=True)
    os._exit(0)  # vLLM's threads would keep the process for seconds


if __name__ == "__main__":
    main()
