"""The audit of a log that has both columns, the sampler's logprobs and the trainer's. It needs no model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..kernels.sampling_params import SamplingParams
from ..verify.mismatch import bits_equal, largest, log_ratios, mean, rest
from .conclusion.conclude import concluded
from .conclusion.outcome import NO_TOLERANCES, Tolerances
from .figures.bands import band_figures
from .figures.drawn_from import check
from .figures.measure import Figures, WorstToken, measure, worst_tokens
from .figures.repeats import Drawn, group_of
from .finding import NothingToCompareError
from .formats.record import LoggedRollout, least_and_most
from .formats.registry import ALL, find_format, log_files, read_rollouts
from .hypotheses.column_causes import try_columns
from .hypotheses.log_checks import check_log
from .hypotheses.signal_checks import SignalLog
from .hypotheses.value_checks import LogValues
from .log_section import LogSection, Rounding, TrainerColumn, VersionFigures, is_doubled
from .page.token_texts import SequenceTexts, TokenTexts
from .report import Measurements, Report
from .settings import LOGGED, Source, assumed, assumed_words

# Tokens that are compared at most: what the figures of so many take is within 2 GB.
_MOST_TOKENS = 2**23
# Sequences and tokens of each that audit.html shows.
_SEQUENCES, _TOKENS = 12, 500
# Tokens of the completions among which hypotheses are tried: the first ones, prompts included.
_EXPLAINED = 2**20
# Weight versions that the report shows at most.
_MOST_VERSIONS = 1000


class _Columns:
    """Both columns of the tokens that have both, rollout by rollout."""

    def __init__(self, values: LogValues) -> None:
        self.values = values
        self.signal = SignalLog()
        # Of the whole file: completions and tokens that were drawn, those without a trainer's column, and
        # those with two log-probabilities. `unsaid` do not say how they were drawn.
        self.logged = self.tokens = self.without_trainer = 0
        self.with_both = self.tokens_with_both = self.unsaid = 0
        self.sampler: list[np.ndarray] = []
        self.trainer: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.places: list[str] = []
        self.ids: list[np.ndarray] = []  # [C] of the whole completion
        self.params: list[SamplingParams | None] = []
        self.groups: list[int] = []
        self.tolerances: list[float] = []
        self.decimals: list[int] = []
        self.versions: list[np.ndarray] = []
        self.count = 0
        self.first: list[LoggedRollout] = []
        self._explained = 0
        self._places, self._version = np.empty(0, np.int32), np.full(1, -1)

    def add(self, place: str, rollout: LoggedRollout, both: np.ndarray, count: int) -> None:
        """Take the tokens of a rollout that have both columns, [C] bool, `count` of them.

        Most lines have both in every token: they share arrays, and none is copied.
        """
        whole = count == len(both)
        self.sampler.append(rollout.logprobs if whole else rollout.logprobs[both])
        self.trainer.append(rollout.trainer_logprobs if whole else rollout.trainer_logprobs[both])
        self.positions.append(self._first_places(count) if whole else np.flatnonzero(both).astype(np.int32))
        self.ids.append(np.array(rollout.completion_ids, np.int32))
        self.params.append(rollout.sampling_params)
        self.groups.append(group_of(rollout))
        self.places.append(place if rollout.turn is None else f"{place}, turn {rollout.turn}")
        self.tolerances.append(rollout.tolerance())
        self.decimals += [x for x in (rollout.decimals, rollout.trainer_decimals) if x is not None]
        if rollout.token_versions is not None:
            self.versions.append(rollout.token_versions[both])
        else:
            span = rollout.weight_span
            version = span[0] if span is not None and span[0] == span[1] else -1
            self.versions.append(self._one_version(version, count))
        self.count += count
        if self._explained < _EXPLAINED:
            self._explained += len(rollout.completion_ids) + len(rollout.prompt_ids or ())
            self.first.append(rollout)

    def _first_places(self, count: int) -> np.ndarray:
        """0, 1, ... of so many tokens, int32; one array for all lines."""
        if count > len(self._places):
            self._places = np.arange(2 * count, dtype=np.int32)
        return self._places[:count]

    def _one_version(self, version: int, count: int) -> np.ndarray:
        """A version, so many times; one array for the lines after another of it."""
        if version != self._version[0] or count > len(self._version):
            self._version = np.full(2 * count, version)
        return self._version[:count]

    def drawn(self) -> list[Drawn]:
        """The rollouts, to be asked whether they were drawn from the columns."""
        columns = (self.groups, self.ids, self.positions, self.sampler, self.trainer, self.params)
        return [Drawn(*rollout) for rollout in zip(*columns, strict=True)]


def audit_columns(
    path: Path,
    format: str = "auto",
    most: int = 0,
    version: int | None = None,
    assumed_params: SamplingParams | None = None,
    tolerances: Tolerances = NO_TOLERANCES,
    ends: Mapping[Path, int] = ALL,
) -> Report:
    """The report on the two columns of a log.

    most: rollouts to compare at most; 0 is no limit. version: takes only the tokens of this weight version.
    assumed_params: the sampling parameters of a rollout whose log says none. tolerances: of the outcome.
    ends: the bytes of each file that count, where the log grows. Every line is read and checked. Raises
    ValueError that names the malformed line, and ValueError where a log has no trainer column.
    """
    settings = (path, format, most, version, assumed_params, ends)
    try:
        columns = _read(*settings, LogValues())
        if stand_ins := columns.values.stand_ins():
            columns = _read(*settings, LogValues(stand_ins))
    except ValueError as error:
        raise ValueError(f"audit: {error}") from None
    if not columns.count:
        with_trainer = columns.without_trainer < columns.logged
        if with_trainer and (faults := columns.values.faults()):
            what = f"{faults[0].name}, {faults[0].text}"
            raise NothingToCompareError(f"audit: {path} leaves no token to compare: {what}")
        version_phrase = "" if version is None else f" of weight version {version}"
        raise ValueError(
            f"audit: {path} holds no trainer logprobs{version_phrase} beside the sampler's; "
            "name the model that drew it with --model"
        )
    return concluded(_measured(path, columns, assumed_params), tolerances)


def _read(
    path: Path,
    format: str,
    most: int,
    version: int | None,
    assumed_params: SamplingParams | None,
    ends: Mapping[Path, int],
    values: LogValues,
) -> _Columns:
    """The columns of a log without what is no log-probability, which `values` counts. See audit_columns."""
    columns = _Columns(values)
    remedy = find_format(next(iter(ends), None) or log_files(path)[0], format).remedy
    for place, rollout in read_rollouts(path, format, ends):
        if rollout.logprobs is None:
            _check_scored(place, rollout, remedy)
        columns.signal.add(place, rollout)
        drawn = rollout.of_version(version)
        tokens = int(np.count_nonzero(drawn))
        if not tokens:
            continue
        unsaid = rollout.sampling_params is None
        if version is not None:
            rollout = replace(rollout, mask=drawn)
        rollout = values.taken(place, rollout.drawn_with(assumed_params), drawn)
        columns.logged += 1
        columns.tokens += tokens
        if rollout.trainer_logprobs is None:
            columns.without_trainer += 1
            continue
        columns.unsaid += unsaid
        both = both_columns(rollout, drawn)
        known = tokens if both is drawn else int(np.count_nonzero(both))
        columns.with_both += known > 0
        columns.tokens_with_both += known
        if known and columns.count < _MOST_TOKENS and not 0 < most <= len(columns.sampler):
            columns.add(place, rollout, both, known)
    return columns


def both_columns(rollout: LoggedRollout, drawn: np.ndarray) -> np.ndarray:
    """Which of the drawn tokens have both log-probabilities, [C] bool. drawn: [C] bool."""
    if not any(math.isnan(least_and_most(x)[0]) for x in (rollout.logprobs, rollout.trainer_logprobs)):
        return drawn
    return drawn & ~(np.isnan(rollout.logprobs) | np.isnan(rollout.trainer_logprobs))


def _unsaid_words(rollouts: int, assumed: SamplingParams | None) -> str:
    """That a log does not say how it was drawn, and what was taken for it."""
    lines = f"Of {rollouts} rollouts the log does not say how they were drawn"
    if rollouts == 1:
        lines = "Of 1 rollout the log does not say how it was drawn"
    if assumed is None:
        return f"{lines}: temperature is missing. --temperature, --top_p and --top_k say it."
    return f"{lines}; {assumed_words(assumed)}"


def _check_scored(place: str, rollout: LoggedRollout, remedy: str) -> None:
    try:
        rollout.check_scored(remedy)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _measured(path: Path, columns: _Columns, assumed_params: SamplingParams | None) -> Measurements:
    trainer, sampler = columns.trainer, columns.sampler
    worst = [_with_place(w, columns) for w in worst_tokens(trainer, sampler)]
    figures, signal = measure(trainer, sampler), columns.signal.judged()
    log_faults = [*columns.values.faults(), *signal.faults, *check_log(columns.first, None)]
    by_version = _by_version(columns)
    tried_sampler, tried_trainer = try_columns(columns.first)
    distribution = check(columns.drawn(), is_doubled(log_faults))
    log = LogSection(
        logged=columns.logged,
        drawn_tokens=columns.tokens,
        no_logprobs=columns.values.counts(),
        signal=signal,
        distribution=distribution,
        hypotheses=tried_sampler,
        trainer_column=TrainerColumn(**vars(tried_trainer), distribution=distribution),
        log_faults=log_faults,
        rounding=rounding(trainer, sampler, columns.tolerances, min(columns.decimals, default=None)),
        by_version=by_version,
        distribution_unsaid=sum(p is None for p in columns.params),
    )
    notes = _notes(figures, columns, by_version)
    return Measurements(
        model=str(path),
        sampler=f"the sampler's column of {path}",
        trainer="the trainer's column",
        dtypes=LOGGED,
        log=log,
        log_notes=[*notes, _unsaid_words(columns.unsaid, assumed_params)] if columns.unsaid else notes,
        assumed=assumed(LOGGED, [p for p in columns.params if p], "none", Source(log=str(path))),
        figures=figures,
        worst=worst,
        token_texts=_token_texts(columns, worst),
        corrections=band_figures(trainer, sampler),
        own_invariance={},
    )


def _notes(figures: Figures, columns: _Columns, by_version: Sequence[VersionFigures]) -> list[str]:
    """What a reader of the report should know of the log."""
    notes = [_left_out(columns)] if columns.tokens_with_both < columns.tokens else []
    if figures.sequences < columns.with_both:
        notes.append(f"{figures.sequences} of the {columns.with_both} completions were compared (-n).")
    if by_version:
        best, *_, worst = sorted(by_version, key=lambda row: row.k3)
        unknown = any(row.weight_version == -1 for row in by_version)
        notes.append(
            f"By weight version, k3 is smallest at version {best.weight_version} ({best.k3:.3g} over "
            f"{best.tokens} tokens) and largest at version {worst.weight_version} "
            f"({worst.k3:.3g} over {worst.tokens} tokens)"
            f"{'; -1 stands for tokens of an unknown version' * unknown}."
        )
    if figures.equal:
        notes.append(
            "Two columns that are equal in every bit can be one column written twice: "
            "some trainers take the sampler's logprobs for their own (verl's bypass mode)."
        )
    return notes


def _left_out(columns: _Columns) -> str:
    """What of the file is not compared, because a log-probability is missing."""
    without = f"; {columns.without_trainer:,} hold no trainer's column" if columns.without_trainer else ""
    return (
        f"Two log-probabilities stand beside {columns.tokens_with_both:,} of {columns.tokens:,} drawn "
        f"tokens in the file, in {columns.with_both:,} of {columns.logged:,} completions{without}. The "
        "other tokens are left out."
    )


def rounding(
    trainer: list[np.ndarray], sampler: list[np.ndarray], tolerances: list[float], decimals: int | None
) -> Rounding | None:
    """How many tokens differ by more than the rounding of the log explains; None where nothing was rounded.

    tolerances: of each sequence, half of the last decimal for each rounded side.
    """
    if decimals is None:
        return None
    allowed = np.repeat(tolerances, [len(x) for x in sampler])
    t, s = np.concatenate(trainer), np.concatenate(sampler)
    # fp32 stores a decimal number with an error of half an ulp; both sides have one. An infinity has none.
    slack = np.nan_to_num((np.spacing(np.abs(t)) + np.spacing(np.abs(s))).astype(np.float64))
    beyond = (np.abs(log_ratios(t, s)) > allowed + slack) & ~bits_equal(t, s)
    return Rounding(decimals, float(max(tolerances)), int(beyond.sum()))


def _token_texts(columns: _Columns, worst: Sequence[WorstToken]) -> TokenTexts:
    """Sequences with their tokens for audit.html, those with the worst tokens first."""
    order = list(dict.fromkeys([*(w.sequence for w in worst), *range(min(len(columns.ids), _SEQUENCES))]))
    sequences = []
    for sequence in order[:_SEQUENCES]:
        ids, pairs = columns.ids[sequence][:_TOKENS], {}
        values = (columns.positions[sequence], columns.sampler[sequence], columns.trainer[sequence])
        for position, s, t in zip(*(x.tolist() for x in values), strict=True):
            pairs[position] = (s, t)
        sequences.append(
            SequenceTexts(
                sequence,
                f"{columns.places[sequence]}: ",
                [(f"{t} ", t, *pairs.get(i, (None, None))) for i, t in enumerate(ids.tolist())],
                len(columns.ids[sequence]) - len(ids),
            )
        )
    return TokenTexts(sequences, len(columns.ids) - len(sequences))


def _with_place(worst: WorstToken, columns: _Columns) -> WorstToken:
    """One of the worst tokens, with its line. A log has ids and no tokenizer, so ids stand for the text."""
    sequence, index = worst.sequence, worst.position
    position = int(columns.positions[sequence][index])
    token = int(columns.ids[sequence][position])
    return replace(
        worst, position=position, token=token, text=f"token {token}", before=columns.places[sequence]
    )


def _by_version(columns: _Columns) -> list[VersionFigures]:
    """The figures of each weight version, oldest first; -1 stands for tokens whose version is not known."""
    versions = np.concatenate(columns.versions)
    known = np.unique(versions)
    if len(known) < 2 or len(known) > _MOST_VERSIONS:
        return []
    d = log_ratios(np.concatenate(columns.trainer), np.concatenate(columns.sampler))
    rows = []
    for version in known.tolist():
        part = d[versions == version]
        known = rest(part)  # as in measure: an infinite ratio has no k3
        rows.append(
            VersionFigures(
                version,
                len(part),
                float((part == 0).mean()),
                largest(np.abs(known)),
                mean(np.exp(known) - 1 - known),
            )
        )
    return rows
