"""Logged rollouts for an audit: read, checked, and taken as what an engine would have drawn."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...engine.rollout.types import Rollout
from ...kernels.sampling_params import SamplingParams
from ..finding import NothingToCompareError
from ..formats.record import LoggedRollout
from ..formats.registry import find_format, log_files, read_rollouts
from ..hypotheses.signal_checks import Signal, SignalLog
from ..hypotheses.value_checks import LogValues
from ..settings import assumed_words


@dataclass(frozen=True)
class Log:
    """The rollouts of a log that an audit compares, and what was read beside them."""

    # A logprob that is NaN is not compared: its token was not drawn, or its logprob is missing.
    rollouts: list[tuple[Rollout, SamplingParams]]
    logged: int  # completions in the file, of the weight version that was asked for
    tolerances: list[float]  # of each rollout: how much rounding moved its logprobs at most
    decimals: int | None  # the fewest decimals of a rollout; None where nothing was rounded
    notes: list[str]  # what a reader of the report should know
    lines: list[LoggedRollout]  # of `rollouts`, all that the log says
    places: list[str]  # of `rollouts`: file and line
    drawn_tokens: int  # of `logged`
    values: LogValues  # what is no log-probability, in the whole file
    signal: Signal  # what rewards and advantages say, in the whole file
    longest_prompt: int = 0  # of all completions, in tokens


def scan_log(
    path: Path,
    vocab: int,
    longest: int = 0,
    version: int | None = None,
    format: str = "auto",
    most: int = 0,
    assumed: SamplingParams | None = None,
    given: bool = False,
) -> Log:
    """Read and check a whole log, and keep the rollouts that are compared with a model.

    version: takes only the tokens of this weight version; None takes all. longest: tokens of a rollout at
    most; 0 is no limit. most: rollouts to keep; 0 keeps all. assumed: the sampling parameters of a rollout
    whose log says none; without it such a log is refused. given: whether the user asked for them. Our own
    format has a place for the temperature, so a log in it is refused where neither says it.
    Raises ValueError that names the malformed line. Raises ValueError that names the weight versions when the
    rollouts are of several, since a model has one.
    """
    if not given and (format == "zerokl" or _is_zerokls(path, format)):
        assumed = None
    settings = (path, vocab, longest, version, format, most, assumed)
    try:
        scan = _Scan(*settings, LogValues())
        if stand_ins := scan.values.stand_ins():
            scan = _Scan(*settings, LogValues(stand_ins))
    except ValueError as error:
        raise ValueError(f"audit: {error}") from None
    if not scan.kept and (faults := scan.values.faults()):
        what = f"{faults[0].name}, {faults[0].text}"
        raise NothingToCompareError(f"audit: {path} leaves no token to compare: {what}")
    _check_versions(path, version, scan.versions)
    return scan.log()


class _Scan:
    """One reading of a whole log, see scan_log. `values` takes out what is no log-probability."""

    def __init__(
        self,
        path: Path,
        vocab: int,
        longest: int,
        version: int | None,
        format: str,
        most: int,
        assumed: SamplingParams | None,
        values: LogValues,
    ):
        self.kept: list[tuple[Rollout, SamplingParams]] = []
        self.versions: set[int] = set()
        self.values = values
        self._signal, self._assumed = SignalLog(), assumed
        self._lines: list[LoggedRollout] = []
        self._places: list[str] = []
        self._logged = self._tokens = self._compared = self._unsaid = self._longest_prompt = 0
        for place, line in read_rollouts(path, format):
            try:
                _check(line, vocab, longest, path, format)
                params = _params(line, assumed)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
            self._signal.add(place, line)
            drawn = _drawn(line, version)
            if drawn.any():
                self._add(place, values.taken(place, line, drawn), drawn, params, version, most)

    def _add(
        self,
        place: str,
        line: LoggedRollout,
        drawn: np.ndarray,
        params: SamplingParams,
        version: int | None,
        most: int,
    ) -> None:
        rollout = _taken(line, drawn, self._logged, version)
        known = int((~np.isnan(rollout.logprobs)).sum())
        self._logged, self._tokens = self._logged + 1, self._tokens + int(drawn.sum())
        self._compared += known
        if not known:
            return
        self._unsaid += line.sampling_params is None
        self._longest_prompt = max(self._longest_prompt, len(line.prompt_ids))
        self.versions |= {rollout.weight_version} if version is not None else _versions(line)
        if not most or len(self.kept) < most:
            self.kept.append((rollout, params))
            self._lines.append(line)
            self._places.append(place)

    def log(self) -> Log:
        """What was read."""
        notes = []
        if self._compared < self._tokens:
            notes = [
                f"The sampler's log-probability stands beside {self._compared:,} of {self._tokens:,} drawn "
                "tokens in the file. The other tokens are left out."
            ]
        if self._unsaid:
            notes.append(_assumed_words(self._unsaid, self._logged, self._assumed))
        return Log(
            self.kept,
            self._logged,
            [line.tolerance(trainer_column=False) for line in self._lines],
            min((line.decimals for line in self._lines if line.decimals is not None), default=None),
            notes,
            self._lines,
            self._places,
            self._tokens,
            self.values,
            self._signal.judged(),
            self._longest_prompt,
        )


def _params(line: LoggedRollout, assumed: SamplingParams | None) -> SamplingParams:
    """What a line was drawn with. Raises ValueError where it does not say it and nothing is assumed."""
    params = line.sampling_params or assumed
    if params is None:
        raise ValueError(
            "temperature is missing; write it into the log, or say with --temperature what "
            "the tokens were drawn with"
        )
    return params


def _check_versions(path: Path, version: int | None, versions: set[int]) -> None:
    """Raise ValueError for a log without a rollout of the version asked for, and for one of several."""
    if not versions:
        raise ValueError(
            f"audit: {path} holds no rollout{'' if version is None else f' of weight version {version}'}"
        )
    if len(versions) > 1:
        raise ValueError(
            f"audit: {path} holds rollouts of weight versions {sorted(versions)}; "
            "choose the model's with --weight_version"
        )


def _assumed_words(unsaid: int, logged: int, assumed: SamplingParams) -> str:
    return f"{unsaid} of {logged} rollouts do not say how they were drawn; {assumed_words(assumed)}"


def with_both(
    trainer: Sequence[np.ndarray], sampler: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Both columns without the tokens for which a side is NaN, and the positions of the others, [C]."""
    positions = [np.flatnonzero(~(np.isnan(t) | np.isnan(s))) for t, s in zip(trainer, sampler, strict=True)]
    return (
        [t[p] for t, p in zip(trainer, positions, strict=True)],
        [s[p] for s, p in zip(sampler, positions, strict=True)],
        positions,
    )


def _is_zerokls(path: Path, format: str) -> bool:
    """Whether a log is in our own fields, which have a place for the temperature."""
    try:
        return find_format(log_files(path)[0], format).name == "zerokl"
    except ValueError as error:
        raise ValueError(f"audit: {error}") from None


def _check(rollout: LoggedRollout, vocab: int, longest: int, path: Path, format: str) -> None:
    """Raise ValueError for a rollout that the model cannot score."""
    if rollout.completion_ids is None or rollout.logprobs is None:
        rollout.check_scored(find_format(log_files(path)[0], format).remedy)
    for name, ids in (("prompt_ids", rollout.prompt_ids), ("completion_ids", rollout.completion_ids)):
        if max(ids) >= vocab:
            wrong = next(t for t in ids if t >= vocab)
            raise ValueError(f"{name} holds {wrong}, outside the model's vocabulary of {vocab}")
    total = len(rollout.prompt_ids) + len(rollout.completion_ids)
    if 0 < longest < total:
        raise ValueError(f"has {total} tokens, more than the model's context ({longest})")


def _versions(rollout: LoggedRollout) -> set[int]:
    """The weight versions of a rollout; 0 where the log says none."""
    if rollout.token_versions is not None:
        return set(rollout.token_versions[~np.isnan(rollout.logprobs)].tolist())
    return set(rollout.weight_span or (0,))


def _drawn(rollout: LoggedRollout, version: int | None) -> np.ndarray:
    """Which tokens the model drew, [C] bool. A log that says no version is of version 0."""
    return replace(rollout, weight_span=rollout.weight_span or (0, 0)).of_version(version)


def _taken(line: LoggedRollout, drawn: np.ndarray, index: int, version: int | None) -> Rollout:
    """The rollout with the logprobs of the tokens that are drawn, [C] bool."""
    logprobs = np.where(drawn, line.logprobs, np.float32(np.nan))
    shown = (line.weight_span or (0, 0))[0] if version is None else version
    return Rollout.of_one_turn(index, 0, line.prompt_ids, line.completion_ids, logprobs, "", shown)
