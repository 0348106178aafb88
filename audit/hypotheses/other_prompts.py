"""The lines of a log after other prompts, or at other positions, than the log says."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..engines.engine import Pair
from .column_numbers import closest
from .evidence import Evidence
from .judgement import MOST
from .prediction import Prediction
from .scorable_lines import Line

# Lines for which other prompts and completions are tried, those farthest apart first; and how many of each.
_SEARCHED, _CANDIDATES = 6, 32
# Nats of a token from which they are tried: an answer to another prompt is farther from this one.
_LEAST = 0.1
# Multiples to which trainers pad.
_MULTIPLES = (8, 16, 32, 64, 128)
# Lines that one forward may hold.
_BATCHES = (2, 3, 4, 6, 8, 12, 16, 32, 64)

Length = Callable[[Line], int]


def nearest_pairs(
    evidence: Evidence, what: str, make: Callable[[Line, Line], Pair | None]
) -> Iterator[Prediction]:
    """The best of other pairs for the lines farthest apart. Neighbours in the log are tried first."""
    lines, others, scorer = evidence.lines, evidence.all_lines, evidence.scorer
    scores, most = {}, 1
    if _mean_gap(evidence.lines) < _LEAST:
        return
    for i in _farthest(evidence):
        line = lines[i]
        near = sorted(others, key=lambda x, here=line.index: abs(x.index - here))
        pairs = dict.fromkeys(pair for x in near if (pair := make(line, x)) not in (None, line.pair))
        pairs = [p for p in pairs if _fits(evidence, p)][:_CANDIDATES]
        if pairs:
            params = [evidence.params()[i]] * len(pairs)
            scores[i], most = closest(line, scorer.score(pairs, params)), max(most, len(pairs))
    if scores:
        yield Prediction(what, scores, searched=True, choices=most, by_line=True)


def _mean_gap(lines: Sequence[Line]) -> float:
    """The largest mean difference of a line, in nats a token."""
    return max(float(np.nanmean(np.minimum(np.abs(x.logged - x.scored), MOST))) for x in lines)


def _farthest(evidence: Evidence) -> list[int]:
    distances = [_mean_gap([x]) for x in evidence.lines]
    return np.argsort(distances)[::-1][:_SEARCHED].tolist()


def _fits(evidence: Evidence, pair: Pair) -> bool:
    """Whether the model's context holds a pair."""
    return len(pair[0]) + len(pair[1]) <= evidence.scorer.model().config.max_positions


def with_prompts(
    evidence: Evidence, what: str, change: Callable[[Line], tuple[int, ...]]
) -> Iterator[Prediction]:
    """The same completions after changed prompts; lines whose prompt does not change are left out."""
    pairs = {
        i: pair
        for i, line in enumerate(evidence.lines)
        if (pair := (change(line), line.completion_ids)) != line.pair and pair[0] and _fits(evidence, pair)
    }
    if pairs:
        params = [evidence.params()[i] for i in pairs]
        scores = evidence.scorer.score(list(pairs.values()), params)
        yield Prediction(what, dict(zip(pairs, scores, strict=True)))


def positions_with_gap(line: Line, gap: int) -> np.ndarray:
    """Positions of the input tokens, [T] int64, with a gap between prompt and completion."""
    p, c = len(line.prompt_ids), len(line.completion_ids)
    return np.concatenate([np.arange(p), np.arange(p, p + c - 1) + gap])


def padded_lengths(evidence: Evidence) -> Iterator[tuple[str, Length]]:
    """To what length a prompt may be padded, in words and as a function of its line.

    What gives all lines the same lengths is not told apart, and is one length with the words of all.
    """
    seen: dict[tuple[int, ...], tuple[list[str], Length]] = {}
    for words, length in _lengths(evidence):
        seen.setdefault(tuple(map(length, evidence.lines)), ([], length))[0].append(words)
    seen.pop(tuple(len(x.prompt_ids) for x in evidence.lines), None)
    for all_words, length in seen.values():
        yield " or ".join(all_words), length


def _lengths(evidence: Evidence) -> Iterator[tuple[str, Length]]:
    by_index = {x.index: len(x.prompt_ids) for x in evidence.all_lines}
    longest = max(evidence.longest_prompt, *by_index.values(), 0)
    yield f"the longest ({longest} tokens)", lambda x: max(len(x.prompt_ids), longest)
    for multiple in _MULTIPLES:
        yield f"a multiple of {multiple}", lambda x, m=multiple: -(-len(x.prompt_ids) // m) * m
        fixed = -(-longest // multiple) * multiple
        yield f"{fixed} tokens", lambda x, f=fixed: max(len(x.prompt_ids), f)
    for size in _BATCHES:
        batches: dict[int, int] = {}
        for index, length in by_index.items():
            batches[index // size] = max(batches.get(index // size, 0), length)
        words = f"the longest of each batch of {size} lines"
        yield words, lambda x, longest_in=batches, n=size: longest_in[x.index // n]
