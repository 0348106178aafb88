"""Compares the log-probabilities of a sampler and of a trainer, and the operations of both engines.

The trainer scores the rollouts. Then one sequence is traced through both engines, where the sampler is one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..engine.display.progress import silent
from ..engine.rollout.types import Rollout
from ..engine.tasks.tokenizer import Tokenizer
from ..kernels.sampling_params import SamplingParams
from ..verify.mismatch import bits_equal
from .columns import rounding
from .engines.engine import Engine
from .figures.bands import Corrections, band_figures
from .figures.batch_invariance import own_invariance
from .figures.drawn_from import check as check_distribution
from .figures.measure import Figures, WorstToken, measure, worst_tokens
from .figures.repeats import Drawn, group_of
from .finding import NothingToCompareError
from .hypotheses.log_causes import log_causes
from .hypotheses.other_scores import Scorer
from .hypotheses.value_checks import ColumnValues, may_cut
from .log_section import LogSection, TwoColumns, is_doubled
from .logs.scan import Log, with_both
from .operations.experts import experts_of_log
from .operations.locate import locate
from .operations.plain_operations import Checkpoint
from .page.token_texts import TokenTexts, token_texts, with_text
from .sections import CacheSection, TraceSection, WayFigures

Rollouts = Sequence[tuple[Rollout, SamplingParams]]
# Tokens of the traced sequence at most, where there is a choice: a trace holds its logits over the
# vocabulary.
_TRACED_TOKENS = 1024


@dataclass(frozen=True)
class Comparison:
    """The sections of a report on which two engines, or a log and a model, are compared."""

    figures: Figures
    worst: list[WorstToken]
    token_texts: TokenTexts
    corrections: Corrections
    own_invariance: dict[str, dict[str, WayFigures]]
    log: LogSection | None = None
    trace: TraceSection | None = None
    caches: CacheSection | None = None


def compare_log(
    rollouts: Rollouts,
    tokenizer: Tokenizer,
    log: Log,
    scorer: Scorer,
    stage: Callable[[str], None] = silent,
) -> Comparison:
    """Compare a log with a model, and try on it what may explain a difference. stage: see audit."""
    trainer = scorer.trainer
    stage(f"scoring {len(rollouts)} completions with {trainer.name}")
    values = ColumnValues(f"{trainer.name}'s")
    scored = _taken(values, rollouts, score(trainer, rollouts), log)
    rollouts, scored, log = _with_both(rollouts, scored, log, values)
    columns = with_both(scored, [r.logprobs for r, _ in rollouts])
    trainer_logprobs, sampling_logprobs, positions = columns
    stage("scoring some of them alone and token by token")
    comparison = _compared(rollouts, tokenizer, scored, trainer_logprobs, sampling_logprobs, positions)
    causes = log_causes(rollouts, scored, log.lines, scorer, log.longest_prompt, stage)
    scores_fault = [fault] if (fault := values.fault()) else []
    section = LogSection(
        logged=log.logged,
        drawn_tokens=log.drawn_tokens,
        no_logprobs=[*log.values.counts(), *values.counts()],
        signal=log.signal,
        distribution=check_distribution(_as_drawn(rollouts, scored, log), is_doubled(causes.log_faults)),
        hypotheses=causes.hypotheses,
        log_faults=[*log.values.faults(), *scores_fault, *log.signal.faults, *causes.log_faults],
        rounding=rounding(trainer_logprobs, sampling_logprobs, log.tolerances, log.decimals),
        trainer_column=causes.trainer_column,
        columns=_two_columns(rollouts, log, tokenizer),
        experts=experts_of_log(log.lines, [r.pair for r, _ in rollouts], scorer.model()),
    )
    ways = {trainer.name: own_invariance(trainer, rollouts, drawn=False)}
    return replace(comparison, own_invariance=ways, log=section)


def _taken(
    values: ColumnValues, rollouts: Rollouts, scored: Sequence[np.ndarray], log: Log
) -> list[np.ndarray]:
    """The scores of each completion, with NaN for what is no log-probability; `values` counts it."""
    return [
        values.taken(place, scores, ~np.isnan(rollout.logprobs), params, may_cut(params))
        for (rollout, params), scores, place in zip(rollouts, scored, log.places, strict=True)
    ]


def _with_both(
    rollouts: Rollouts, scored: list[np.ndarray], log: Log, values: ColumnValues
) -> tuple[Rollouts, list[np.ndarray], Log]:
    """The completions that have a token with both log-probabilities. Raises ValueError where none has."""
    pairs = zip(rollouts, scored, strict=True)
    kept = [i for i, ((r, _), t) in enumerate(pairs) if not (np.isnan(r.logprobs) | np.isnan(t)).all()]
    if not kept:
        fault = values.fault()
        raise NothingToCompareError(f"audit: no token is left to compare: {fault.name}, {fault.text}")
    lists = {name: [getattr(log, name)[i] for i in kept] for name in ("tolerances", "lines", "places")}
    return [rollouts[i] for i in kept], [scored[i] for i in kept], replace(log, **lists)


def _two_columns(rollouts: Rollouts, log: Log, tokenizer: Tokenizer) -> TwoColumns | None:
    """The log's own two columns, of the rollouts that have tokens with both; None where none has."""
    nothing = np.array([np.nan], np.float32)
    trainer = [nothing if x.trainer_logprobs is None else x.trainer_logprobs for x in log.lines]
    both = [~np.isnan(r.logprobs) & ~np.isnan(t) for (r, _), t in zip(rollouts, trainer, strict=True)]
    known = [i for i, x in enumerate(both) if x.any()]
    if not known:
        return None
    rollouts, trainer = ([x[i] for i in known] for x in (rollouts, trainer))
    positions = [np.flatnonzero(both[i]) for i in known]
    columns = [x[p] for x, p in zip(trainer, positions, strict=True)]
    sampler = [r.logprobs[p] for (r, _), p in zip(rollouts, positions, strict=True)]
    compared = _compared(rollouts, tokenizer, trainer, columns, sampler, positions)
    texts = [replace(x, sequence=known[x.sequence]) for x in compared.token_texts.sequences]
    return TwoColumns(
        compared.figures,
        [replace(x, sequence=known[x.sequence]) for x in compared.worst],
        replace(compared.token_texts, sequences=texts),
    )


def compare_engines(
    sampler: Engine,
    trainer: Engine,
    rollouts: Rollouts,
    tokenizer: Tokenizer,
    redraw: Callable[[], Rollouts] | None = None,
    checkpoints: Sequence[Checkpoint] = (),
    stage: Callable[[str], None] = silent,
) -> Comparison:
    """Compare the engine that drew rollouts with a trainer.

    redraw: draws the rollouts again from the same seeds, after the sampler has dropped its caches. Other bits
    then show that a cache was stale. checkpoints: of the sampler and of the trainer, and the trainer's in the
    sampler's dtype where the two have two; each operation is judged by them. stage: see audit.
    """
    stage(f"scoring {len(rollouts)} completions with {trainer.name}")
    scored = score(trainer, rollouts)
    stage("scoring some of them alone and token by token")
    comparison = _compared(rollouts, tokenizer, scored, scored, [r.logprobs for r, _ in rollouts])
    ways = {
        name: own_invariance(engine, rollouts, drawn=engine is sampler)
        for name, engine in _by_name(sampler, trainer).items()
    }
    stage("tracing every operation of one sequence in both engines")
    traced, params = rollouts[_traced(rollouts, comparison.worst)]
    trace = locate(sampler, trainer, traced.pair, params, checkpoints[:2], *checkpoints[2:])
    caches = None
    if not comparison.figures.equal and redraw is not None and sampler.drop_caches():
        stage("drawing again without the sampler's caches")
        caches = _without_caches(trainer, rollouts, redraw())
    return replace(comparison, own_invariance=ways, trace=trace, caches=caches)


def _compared(
    rollouts: Rollouts,
    tokenizer: Tokenizer,
    scored: Sequence[np.ndarray],
    trainer_logprobs: Sequence[np.ndarray],
    sampling_logprobs: Sequence[np.ndarray],
    positions: Sequence[np.ndarray] | None = None,
) -> Comparison:
    """The figures of both columns.

    scored: the trainer's logprobs of whole completions. positions: in the completions, of the tokens that are
    compared; None where all are.
    """
    worst = worst_tokens(trainer_logprobs, sampling_logprobs)
    if positions:
        worst = [replace(w, position=int(positions[w.sequence][w.position])) for w in worst]
    return Comparison(
        figures=measure(trainer_logprobs, sampling_logprobs),
        worst=[with_text(w, rollouts, tokenizer) for w in worst],
        token_texts=token_texts(rollouts, scored, tokenizer, worst),
        corrections=band_figures(trainer_logprobs, sampling_logprobs),
        own_invariance={},
    )


def _without_caches(trainer: Engine, rollouts: Rollouts, again: Rollouts) -> CacheSection:
    """What the sampler drew again after its caches were dropped, beside what it drew before."""
    figures = measure(score(trainer, again), [r.logprobs for r, _ in again])
    stale = any(
        a.completion_ids != b.completion_ids or not bits_equal(a.logprobs, b.logprobs).all()
        for (a, _), (b, _) in zip(rollouts, again, strict=True)
    )
    return CacheSection(figures.frac_equal, stale)


def _as_drawn(rollouts: Rollouts, scored: Sequence[np.ndarray], log: Log) -> list[Drawn]:
    """The tokens of a log that have the sampler's logprobs, beside what the trainer gives them."""
    drawn = []
    for (rollout, params), scores, line in zip(rollouts, scored, log.lines, strict=True):
        places = np.flatnonzero(~(np.isnan(rollout.logprobs) | np.isnan(scores)))
        ids = np.array(rollout.completion_ids)
        drawn.append(Drawn(group_of(line), ids, places, rollout.logprobs[places], scores[places], params))
    return drawn


def _traced(rollouts: Rollouts, worst: Sequence[WorstToken]) -> int:
    """The rollout that is traced: the one with the worst token, unless it is long; then the shortest."""
    lengths = [sum(map(len, r.pair)) for r, _ in rollouts]
    index = worst[0].sequence if worst else 0
    return index if lengths[index] <= _TRACED_TOKENS else lengths.index(min(lengths))


def _by_name(sampler: Engine, trainer: Engine) -> dict[str, Engine]:
    """The engines by name. Two engines of one name get their side as well."""
    if sampler is trainer:
        return {trainer.name: trainer}
    sides = {"sampler": sampler, "trainer": trainer}
    return {e.name if sampler.name != trainer.name else f"{e.name} ({side})": e for side, e in sides.items()}


def score(engine: Engine, rollouts: Rollouts) -> list[np.ndarray]:
    """The engine's logprobs of each rollout. Rollouts with equal sampling parameters are scored together."""
    scored: dict[int, np.ndarray] = {}
    for sampling_params in dict.fromkeys(params for _, params in rollouts):
        indices = [i for i, (_, params) in enumerate(rollouts) if params == sampling_params]
        pairs = [rollouts[i][0].pair for i in indices]
        scored |= zip(indices, engine.score(pairs, sampling_params), strict=True)
    return [scored[i] for i in range(len(rollouts))]
