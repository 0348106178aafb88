"""A run's sampling with and without guessed tokens, by turns, on one core.

    python -m zerokl.benchmarks.speculate [--preset turns] [--model FOLDER] [--k 4] [--at_once 64] [--vllm]

It measures native.speculate, or with --vllm vllm.speculate.

The run draws each call's trajectories without guesses. Then two samplers draw the same requests again, over
the same weights: one guesses nothing, and the other guesses up to k tokens ahead. They begin by turns. All
three must have the same bits. The one that guesses lives as long as the run, so it knows the completions of
earlier steps. Seconds are those of the process's own work, without environments and other processes.

It prints for the halves of the run: the mean -log-probability of a drawn token, the share of guesses that
were drawn, tokens a turn, and the seconds with guesses over those without, of all calls and the median.
"""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from zerokl.engine.config.config_file import load_config
from zerokl.engine.config.vllm_section import VllmConfig
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import Completion, Request, RequestSource
from zerokl.engine.rollout.vllm.sampler import VllmZeroklSampler
from zerokl.engine.runs.run import train
from zerokl.engine.train.parallel import worker
from zerokl.model.decoder import Decoder

SETTINGS = {"workers": 1, "threads": 1, "evaluation.every": 0, "checkpoint.every": 0, "tracking": []}


class _Recorded:
    """A source that notes what it gives and takes."""

    def __init__(self, source: RequestSource):
        self._source, self._open = source, {}
        self.drawn: dict[int, list[tuple[Request, Completion]]] = {}

    def ready(self, at_least: float) -> list[tuple[int, Request]]:
        pairs = self._source.ready(at_least)
        self._open |= dict(pairs)
        return pairs

    def completed(self, place: int, completion: Completion) -> None:
        self.drawn.setdefault(place, []).append((self._open.pop(place), completion))
        self._source.completed(place, completion)


class _Again:
    """The same requests, each as soon as the one before it is completed."""

    def __init__(self, drawn: dict[int, list[tuple[Request, Completion]]]):
        self._left = {place: list(pairs) for place, pairs in drawn.items()}
        self._ready = list(drawn)

    def ready(self, at_least: float) -> list[tuple[int, Request]]:
        places, self._ready = sorted(self._ready), []
        return [(place, self._left[place][0][0]) for place in places]

    def completed(self, place: int, completion: Completion) -> None:
        _, expected = self._left[place].pop(0)
        same = completion.logprobs.tobytes() == expected.logprobs.tobytes()
        if not same or completion.ids != expected.ids:
            raise SystemExit("speculate: a guess has changed a bit")
        if self._left[place]:
            self._ready.append(place)


class Call(NamedTuple):
    """What one call of the sampler took."""

    plain_s: float
    guessing_s: float
    tokens: int
    nats: float
    guesses: int
    drawn: int


class ByTurns(NativeSampler):
    """Draws as the run asks, and then twice more."""

    k, at_once, vllm_model = 4, 64, ""
    calls: list[Call] = []  # noqa: RUF012 (there is one run)

    def __init__(self, decoder, *args, **kwargs):
        super().__init__(decoder, *args, **kwargs)
        self._both = [self._sampler(decoder, k) for k in (0, self.k)]

    def _sampler(self, decoder: Decoder, k: int) -> NativeSampler | VllmZeroklSampler:
        if not self.vllm_model:
            return NativeSampler(decoder, self.at_once, speculate=k)
        cfg = VllmConfig(max_concurrency=self.at_once, speculate=k)
        return VllmZeroklSampler(Path(self.vllm_model), decoder.config, decoder.flat, cfg, decoder.numerics)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        completions = super().generate(requests)
        self._measure({i: [pair] for i, pair in enumerate(zip(requests, completions, strict=True))})
        return completions

    def serve(self, source: RequestSource) -> None:
        recorded = _Recorded(source)
        super().serve(recorded)
        self._measure(recorded.drawn)

    def _measure(self, drawn: dict[int, list[tuple[Request, Completion]]]) -> None:
        if not drawn:
            return
        counts, seconds = self._both[1].stopwatch.counts, [0.0, 0.0]
        before = counts["guesses"], counts["guesses_drawn"]
        for sampler in self._both:
            sampler.sync_weights(self.version)
        for i in (0, 1) if len(self.calls) % 2 else (1, 0):
            began = time.process_time()
            self._both[i].serve(_Again(drawn))
            self._both[i].end_turns()
            seconds[i] = time.process_time() - began
        completions = [completion for pairs in drawn.values() for _, completion in pairs]
        self.calls.append(
            Call(
                *seconds,
                sum(len(c.ids) for c in completions),
                -sum(math.fsum(c.logprobs) for c in completions),
                counts["guesses"] - before[0],
                counts["guesses_drawn"] - before[1],
            )
        )


def shown(calls: Sequence[Call]) -> str:
    """A line for some calls."""
    plain_s, guessing_s, tokens, nats, guesses, drawn = map(sum, zip(*calls, strict=True))
    ratios = [call.guessing_s / call.plain_s for call in calls]
    return (
        f"{len(calls)} calls, {tokens} tokens of {nats / tokens:.2f} nats; {guesses} guesses, "
        f"{drawn / max(guesses, 1):.0%} drawn; {tokens / (tokens - drawn):.2f} tokens a turn; seconds "
        f"{guessing_s / plain_s:.2f} of those without (median {statistics.median(ratios):.2f}); "
        f"{tokens / plain_s:.0f} and {tokens / guessing_s:.0f} tokens a second"
    )


def main() -> None:
    """Train, and print both halves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default=None)
    parser.add_argument("--config", default=None)
    parser.add_argument("--model", default=None)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--at_once", type=int, default=64, help="samples that are drawn together")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--vllm", action="store_true", help="inside vLLM, with zerokl's decoder")
    args = parser.parse_args()
    settings = SETTINGS | {"steps": args.steps}
    if args.model:
        settings["model"] = args.model
    config = load_config(args.config, args.preset, settings)
    ByTurns.vllm_model = config.model if args.vllm else ""
    ByTurns.k, ByTurns.at_once, worker.NativeSampler = args.k, args.at_once, ByTurns
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder) / "run")
    half = len(ByTurns.calls) // 2
    print(f"k {args.k}, {args.at_once} samples at once")
    print(f"first half   {shown(ByTurns.calls[:half])}")
    print(f"second half  {shown(ByTurns.calls[half:])}")


if __name__ == "__main__":
    main()
