"""An engine against itself: does it give the same bits however it scores, and whatever it draws beside?

`own_invariance` scores the first sequences of every audit alone, together, and token by token.

`batch_invariance` is `zerokl audit --batch_invariance N`. Each prompt is drawn alone first, greedily, so that
no random number decides a token. Then it is drawn again in company. A request is equal when its tokens and
the bits of their log-probabilities are those of the request alone.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ...engine.display.progress import silent
from ...engine.rollout.types import GenerationParams, Rollout
from ...kernels.sampling_params import SamplingParams
from ...verify.difference import first_unequal
from ...verify.mismatch import bits_equal, first_unequal_bits, largest, log_ratios
from ..engines.engine import Engine, Pair
from ..engines.vllm import VllmEngine
from ..sections import BatchInvariance, Place, RequestsFigures, WayFigures

# Sequences on which each engine's own invariance is measured: they are scored one by one and token by token.
_SCORED = 8
# Tokens of a prompt that joins as a long prefill, where the context has room for it.
_LONG = 1024
# One such prompt for so many requests.
_REQUESTS_PER_LONG = 4

Prompt = Sequence[int]


def own_invariance(
    engine: Engine, rollouts: Sequence[tuple[Rollout, SamplingParams]], drawn: bool
) -> dict[str, WayFigures]:
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
        way: WayFigures(
            len(together),
            int((~bits_equal(together, np.concatenate(logprobs))).sum()),
            largest(np.abs(log_ratios(together, np.concatenate(logprobs)))),
        )
        for way, logprobs in ways.items()
    }


def batch_invariance(
    engine: Engine,
    prompts: Sequence[Prompt],
    requests: int,
    max_tokens: int,
    stop_ids: frozenset[int],
    context: int,
    stage: Callable[[str], None] = silent,
) -> BatchInvariance:
    """Draw up to `requests` completions at once, and compare each with the same prompt drawn alone.

    prompts: are repeated until there are enough. context: tokens of a sequence at most. stage: is called with
    what begins now, in words.
    """
    asked = [tuple(prompts[i % len(prompts)]) for i in range(requests)]
    greedy = GenerationParams(SamplingParams(temperature=0.0), 1, max_tokens, stop_ids)

    def draw(company: Sequence[Prompt]) -> list[Rollout]:
        return engine.generate(company, greedy, 0)

    stage(f"drawing each of {len(set(asked))} prompts alone")
    alone = {prompt: draw([prompt])[0] for prompt in dict.fromkeys(asked)}
    again = [draw([prompt])[0] for prompt in alone]
    rows = [_compare("alone, again", 1, again, list(alone.values()))]
    for way, company in _ways(engine, asked, context - max_tokens):
        stage(f"drawing {way}")
        reference = [alone[prompt] for prompt in company[:requests]]
        rows.append(_compare(way, len(company), draw(company)[:requests], reference))
    together = [row.at_once for row in rows if row.unequal]
    return BatchInvariance(requests, rows, min(together, default=None))


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
    tokens = [token for prompt in asked for token in prompt]
    length = min(_LONG, room)
    long = [
        tuple(np.resize(tokens[i:], length).tolist()) for i in range(-(-len(asked) // _REQUESTS_PER_LONG))
    ]
    yield f"{len(asked)} at once beside {len(long)} prefills of {length} tokens", [*asked, *long]


def _compare(way: str, at_once: int, drawn: Sequence[Rollout], alone: Sequence[Rollout]) -> RequestsFigures:
    """How many requests differ from the same prompts drawn alone, and where the first of them does."""
    unequal, first, max_abs = 0, None, 0.0
    for request, (a, b) in enumerate(zip(drawn, alone, strict=True)):
        position = _first_difference(a, b)
        if position is None:
            continue
        unequal += 1
        first = first or Place(request, position)
        same = _same_tokens(a, b)
        gaps = np.abs(a.logprobs[:same].astype(np.float64) - b.logprobs[:same])
        max_abs = max(max_abs, float(gaps.max(initial=0.0)))
    return RequestsFigures(way, at_once, len(drawn), unequal, first, max_abs)


def _same_tokens(a: Rollout, b: Rollout) -> int:
    """Tokens before the first one that differs."""
    position = first_unequal(a.completion_ids, b.completion_ids)
    return len(a.completion_ids) if position is None else position


def _first_difference(a: Rollout, b: Rollout) -> int | None:
    """The first position whose token or whose logprob's bits differ; None where all are equal."""
    token = first_unequal(a.completion_ids, b.completion_ids)
    logprob = first_unequal_bits(a.logprobs[:token], b.logprobs[:token])
    return token if logprob is None else logprob
