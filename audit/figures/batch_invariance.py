"""An engine against itself: does it give the same bits however it scores, and whatever it draws beside?

`own_invariance` scores the first sequences of every audit alone, together, and token by token.

`batch_invariance` is `zerokl audit --own N`. Each prompt is drawn alone first, greedily, so that no random
number decides a token. Then it is drawn again in company. A request is equal when its tokens and the bits of
their log-probabilities are those of the request alone.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ...engine.rollout.types import GenerationParams, Rollout
from ...engine.runs.progress import silent
from ...kernels.sampling_params import SamplingParams
from ...verify.mismatch import largest, log_ratios
from ..engines.engine import Engine, Pair
from ..engines.vllm import VllmEngine

# Sequences on which each engine's own invariance is measured: they are scored one by one and token by token.
_SCORED = 8
# Requests at once, at most.
_MOST = 256
# Tokens of a prompt that joins as a long prefill, where the context has room for it.
_LONG = 1024
# One such prompt for so many requests.
_REQUESTS_PER_LONG = 4

Prompt = Sequence[int]


def own_invariance(
    engine: Engine, rollouts: Sequence[tuple[Rollout, SamplingParams]], drawn: bool
) -> dict[str, Any]:
    """How an engine's logprobs of the first sequences depend on how it computes them.

    The ways are: scored alone or in a batch, and read token by token. drawn: the engine drew the rollouts, so
    its logprobs of then are compared with those that it computes now, too.
    """
    sampling_params = rollouts[0][1]
    first = [r for r, params in rollouts if params == sampling_params][:_SCORED]
    pairs: list[Pair] = [r.pair for r in first]
    together = np.concatenate(engine.score(pairs, sampling_params))
    ways = {"drawn against scored": [r.logprobs for r in first]} if drawn else {}
    if not isinstance(engine, VllmEngine) or engine.scores_together(sampling_params):
        ways["solo against batched"] = engine.score(pairs, sampling_params, together=False)
    if (decoded := engine.decode(pairs, sampling_params)) is not None:
        ways["decode against prefill"] = decoded
    return {
        way: {
            "tokens": len(together),
            "unequal": int((together.view(np.int32) != np.concatenate(logprobs).view(np.int32)).sum()),
            "max_abs": largest(np.abs(log_ratios(together, np.concatenate(logprobs)))),
        }
        for way, logprobs in ways.items()
    }


def check_requests(requests: int, of_log: bool) -> None:
    """Raise ValueError where batch_invariance cannot be asked for. requests: 0 does not ask for it."""
    if requests and of_log:
        raise ValueError("audit: --own compares a sampler with itself, and a log cannot draw again")
    if requests and not 2 <= requests <= _MOST:
        raise ValueError(f"audit: own ({requests}) must lie in 2 to {_MOST}")


def batch_invariance(
    engine: Engine,
    prompts: Sequence[Prompt],
    requests: int,
    max_tokens: int,
    stop_ids: frozenset[int],
    context: int,
    stage: Callable[[str], None] = silent,
) -> dict[str, Any]:
    """Draw up to `requests` completions at once, and compare each with the same prompt drawn alone.

    prompts: are repeated until there are enough. context: tokens of a sequence at most. stage: is called with
    what begins now, in words.

    Returns "requests", "rows" (a way of drawing each: its name, requests at once, requests compared and
    unequal, the first place that differs, the largest difference there is before the tokens part), and
    "unequal_from": the lowest number of requests at once at which a bit differs; None where none does.
    """
    asked = [tuple(prompts[i % len(prompts)]) for i in range(requests)]
    greedy = GenerationParams(SamplingParams(temperature=0.0), 1, max_tokens, stop_ids)

    def draw(company: Sequence[Prompt]) -> list[Rollout]:
        return engine.generate(company, greedy, 0)

    stage(f"drawing each of {len(set(asked))} prompts alone")
    alone = {prompt: draw([prompt])[0] for prompt in dict.fromkeys(asked)}
    again = [draw([prompt])[0] for prompt in alone]
    rows = [{"way": "alone, again", "at_once": 1} | _compare(again, list(alone.values()))]
    for way, company in _ways(engine, asked, context - max_tokens):
        stage(f"drawing {way}")
        reference = [alone[prompt] for prompt in company[:requests]]
        rows.append({"way": way, "at_once": len(company)} | _compare(draw(company)[:requests], reference))
    together = [row["at_once"] for row in rows if row["unequal"]]
    return {"requests": requests, "rows": rows, "unequal_from": min(together, default=None)}


def _ways(engine: Engine, asked: Sequence[Prompt], room: int) -> Iterator[tuple[str, Sequence[Prompt]]]:
    """The ways to draw, and the prompts of each. room: tokens of a prompt at most."""
    at_once = 2
    while at_once < len(asked):
        yield f"{at_once} at once", asked[:at_once]
        at_once *= 2
    yield f"{len(asked)} at once", asked
    yield f"{len(asked)} at once, again", asked
    if engine.drop_caches():
        yield f"{len(asked)} at once, caches dropped", asked
    words = [token for prompt in asked for token in prompt]
    length = min(_LONG, room)
    long = [tuple(np.resize(words[i:], length).tolist()) for i in range(-(-len(asked) // _REQUESTS_PER_LONG))]
    yield f"{len(asked)} at once beside {len(long)} prefills of {length} tokens", [*asked, *long]


def _compare(drawn: Sequence[Rollout], alone: Sequence[Rollout]) -> dict[str, Any]:
    """How many requests differ from the same prompts drawn alone, and where the first of them does."""
    unequal, first, max_abs = 0, None, 0.0
    for request, (a, b) in enumerate(zip(drawn, alone, strict=True)):
        position = _first_difference(a, b)
        if position is None:
            continue
        unequal += 1
        first = first or {"request": request, "position": position}
        same = _same_tokens(a, b)
        gaps = np.abs(a.logprobs[:same].astype(np.float64) - b.logprobs[:same])
        max_abs = max(max_abs, float(gaps.max(initial=0.0)))
    return {"compared": len(drawn), "unequal": unequal, "first": first, "max_abs": max_abs}


def _same_tokens(a: Rollout, b: Rollout) -> int:
    """Tokens before the first one that differs."""
    pairs = zip(a.completion_ids, b.completion_ids, strict=False)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(a.logprobs), len(b.logprobs)))


def _first_difference(a: Rollout, b: Rollout) -> int | None:
    """The first position whose token or whose logprob's bits differ; None where all are equal."""
    same = _same_tokens(a, b)
    bits = a.logprobs[:same].view(np.int32) != b.logprobs[:same].view(np.int32)
    if bits.any():
        return int(bits.argmax())
    return None if a.completion_ids == b.completion_ids else same
