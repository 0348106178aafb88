"""Hypotheses about the tokens: the sampler read other ids, or other positions, than the log says."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..engines.engine import Pair
from .evidence import Evidence
from .lines import Line
from .numbers import closest
from .prediction import Prediction
from .scorer import decoder_scores

# Lines for which other prompts and completions are tried, those farthest apart first; and how many of each.
_SEARCHED, _CANDIDATES = 6, 32
# Nats of a token from which they are tried: an answer to another prompt is farther from this one.
_LEAST = 0.1
# Gaps before the completion's positions; and multiples to which trainers pad.
_GAPS = range(2, 17)
_MULTIPLES = (8, 16, 32, 64, 128)
# Lines that one forward may hold.
_BATCHES = (2, 3, 4, 6, 8, 12, 16, 32, 64)


def another_prompt(evidence: Evidence) -> Iterator[Prediction]:
    """The prompt of another line."""
    yield from _searched(
        evidence,
        "the completions were drawn for the prompts of other lines",
        lambda line, other: (other.prompt_ids, line.completion_ids),
    )


def another_completion(evidence: Evidence) -> Iterator[Prediction]:
    """The completion of another line of the same length, with the numbers of this one."""
    yield from _searched(
        evidence,
        "the logged numbers belong to the completions of other lines, drawn for this line's prompt",
        lambda line, other: (
            (line.prompt_ids, other.completion_ids)
            if len(line.completion_ids) == len(other.completion_ids)
            else None
        ),
    )


def _searched(
    evidence: Evidence, what: str, make: Callable[[Line, Line], Pair | None]
) -> Iterator[Prediction]:
    """The best of other pairs for the lines farthest apart. Neighbours in the log are tried first."""
    lines, others, scorer = evidence.lines, evidence.all_lines, evidence.scorer
    scores, most = {}, 1
    if _mean_gap(evidence.lines) < _LEAST:
        return
    for i in _farthest(evidence):
        line = lines[i]
        near = sorted(others, key=lambda x, at=line.index: abs(x.index - at))
        pairs = dict.fromkeys(pair for x in near if (pair := make(line, x)) not in (None, line.pair))
        pairs = [p for p in pairs if _fits(evidence, p)][:_CANDIDATES]
        if pairs:
            params = [evidence.params()[i]] * len(pairs)
            scores[i], most = closest(line, scorer.score(pairs, params)), max(most, len(pairs))
    if scores:
        yield Prediction(what, scores, searched=True, choices=most, by_line=True)


def _mean_gap(lines: Sequence[Line]) -> float:
    """The largest mean difference of a line, in nats a token."""
    return max(float(np.nanmean(np.minimum(np.abs(x.logged - x.scored), 20.0))) for x in lines)


def _farthest(evidence: Evidence) -> list[int]:
    distances = [_mean_gap([x]) for x in evidence.lines]
    return np.argsort(distances)[::-1][:_SEARCHED].tolist()


def _fits(evidence: Evidence, pair: Pair) -> bool:
    """Whether the model's context holds a pair."""
    return len(pair[0]) + len(pair[1]) <= evidence.scorer.model().config.max_positions


def _with_prompts(
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


def special_tokens(evidence: Evidence) -> Iterator[Prediction]:
    """A token more or less at an end of the prompt: a BOS, the end token of the turn before."""
    tokenizer = evidence.scorer.tokenizer
    special = tokenizer.special_ids
    for token in special:
        shown = tokenizer.pieces([token])[0]
        yield from _with_prompts(
            evidence,
            f"the sampler's prompts begin with {shown}, which the log lacks",
            lambda x, t=token: (t, *x.prompt_ids),
        )
        yield from _with_prompts(
            evidence,
            f"the sampler's prompts end with {shown}, which the log lacks",
            lambda x, t=token: (*x.prompt_ids, t),
        )
    yield from _with_prompts(
        evidence,
        "the log's prompts have a first token that the sampler did not read",
        lambda x: x.prompt_ids[1:],
    )
    yield from _with_prompts(
        evidence,
        "the log's prompts have a last token that the sampler did not read",
        lambda x: x.prompt_ids[:-1],
    )


def padding_read(evidence: Evidence) -> Iterator[Prediction]:
    """Padding before the prompt that attention did not mask out."""
    for token in evidence.scorer.tokenizer.padding_ids:
        for words, length in _padded_lengths(evidence):
            yield from _with_prompts(
                evidence,
                f"attention reads the padding (token {token}) before prompts that are padded to {words}",
                lambda x, t=token, n=length: (t,) * (n(x) - len(x.prompt_ids)) + x.prompt_ids,
            )


def shifted_positions(evidence: Evidence) -> Iterator[Prediction]:
    """Padding between prompt and completion: masked out, but counted in the positions."""
    scorer = evidence.scorer
    most = scorer.model().config.max_positions
    for words, length in _padded_lengths(evidence):
        gaps = [length(line) - len(line.prompt_ids) for line in evidence.lines]
        longest = max(
            g + len(x.prompt_ids) + len(x.completion_ids) for g, x in zip(gaps, evidence.lines, strict=True)
        )
        if any(gaps) and longest <= most:
            positions = [_positions(line, gap) for line, gap in zip(evidence.lines, gaps, strict=True)]
            what = f"the positions of the completion count padding after prompts that are padded to {words}"
            yield Prediction(what, decoder_scores(scorer.model(), evidence, positions))


def restarted_positions(evidence: Evidence) -> Iterator[Prediction]:
    """The completion's positions begin again at 0, or leave one out."""
    scorer = evidence.scorer
    for what, gap in (
        ("the positions of the completion begin again at 0", lambda line: -len(line.prompt_ids)),
        ("the positions of the completion are one too high", lambda line: 1),
        ("the positions of the completion are one too low", lambda line: -1),
        *((f"the positions of the completion are {n} too high", lambda line, n=n: n) for n in _GAPS),
    ):
        positions = [_positions(line, gap(line)) for line in evidence.lines]
        if max(p.max() for p in positions) < scorer.model().config.max_positions:
            yield Prediction(what, decoder_scores(scorer.model(), evidence, positions))


def _positions(line: Line, gap: int) -> np.ndarray:
    """Positions of the input tokens, [T] int64, with a gap between prompt and completion."""
    p, c = len(line.prompt_ids), len(line.completion_ids)
    return np.concatenate([np.arange(p), np.arange(p, p + c - 1) + gap])


Length = Callable[[Line], int]


def _padded_lengths(evidence: Evidence) -> Iterator[tuple[str, Length]]:
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
    of_index = {x.index: len(x.prompt_ids) for x in evidence.all_lines}
    longest = max(evidence.longest_prompt, *of_index.values(), 0)
    yield f"the longest ({longest} tokens)", lambda x: max(len(x.prompt_ids), longest)
    for multiple in _MULTIPLES:
        yield f"a multiple of {multiple}", lambda x, m=multiple: -(-len(x.prompt_ids) // m) * m
        fixed = -(-longest // multiple) * multiple
        yield f"{fixed} tokens", lambda x, f=fixed: max(len(x.prompt_ids), f)
    for size in _BATCHES:
        batches: dict[int, int] = {}
        for index, length in of_index.items():
            batches[index // size] = max(batches.get(index // size, 0), length)
        words = f"the longest of each batch of {size} lines"
        yield words, lambda x, of=batches, n=size: of[x.index // n]


def retokenised(evidence: Evidence) -> Iterator[Prediction]:
    """The ids of the text once it was decoded and encoded again."""
    tokenizer = evidence.scorer.tokenizer
    yield from _with_prompts(
        evidence,
        "the sampler read the prompt's text encoded again, which gives other ids",
        lambda x: tuple(tokenizer.round_trip(x.prompt_ids)),
    )
    pairs = {}
    for i, line in enumerate(evidence.lines):
        again = tuple(tokenizer.round_trip(line.completion_ids))
        if again != line.completion_ids and len(again) == len(line.completion_ids):
            pairs[i] = (line.prompt_ids, again)
    if pairs:
        scores = evidence.scorer.score(list(pairs.values()), [evidence.params()[i] for i in pairs])
        what = "the numbers are of the completion's text encoded again, which gives other ids"
        yield Prediction(what, dict(zip(pairs, scores, strict=True)))
