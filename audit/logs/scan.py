"""Logged rollouts for an audit: read, checked, and taken as what an engine would have drawn."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...engine.rollout.types import Rollout
from ...kernels.sampling_params import SamplingParams
from ..formats.record import LoggedRollout
from ..formats.registry import find_format, log_files, read_rollouts
from ..settings import assumed_words


@dataclass(frozen=True)
class Log:
    """The rollouts of a log that an audit compares, and what was read beside them."""

    # A logprob that is NaN is not compared: its token was not drawn, or its logprob is missing.
    rollouts: list[tuple[Rollout, SamplingParams]]
    logged: int  # completions in the log, of the weight version that was asked for
    tolerances: list[float]  # of each rollout: how much rounding moved its logprobs at most
    decimals: int | None  # the fewest decimals of a rollout; None where nothing was rounded
    notes: list[str]  # what a reader of the report should know
    lines: list[LoggedRollout]  # of `rollouts`, all that the log says
    longest_prompt: int = 0  # of all completions, in tokens


def read_log(
    path: Path, vocab: int, longest: int = 0, version: int | None = None, format: str = "zerokl"
) -> list[tuple[Rollout, SamplingParams]]:
    """The rollouts of a log; see scan_log."""
    return scan_log(path, vocab, longest, version, format).rollouts


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
    kept: list[tuple[Rollout, SamplingParams]] = []
    lines: list[LoggedRollout] = []
    versions: set[int] = set()
    logged = unsaid = longest_prompt = 0
    if not given and (format == "zerokl" or _is_zerokls(path, format)):
        assumed = None
    try:
        for place, line in read_rollouts(path, format):
            try:
                _check(line, vocab, longest, path, format)
                params = _params(line, assumed)
                rollout = _taken(line, logged, version)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
            if rollout is None:
                continue
            logged, unsaid = logged + 1, unsaid + (line.sampling_params is None)
            longest_prompt = max(longest_prompt, len(line.prompt_ids))
            versions |= {rollout.weight_version} if version is not None else _versions(line)
            if not most or len(kept) < most:
                kept.append((rollout, params))
                lines.append(line)
    except ValueError as error:
        raise ValueError(f"audit: {error}") from None
    _check_versions(path, version, versions)
    return Log(
        kept,
        logged,
        [line.tolerance(trainer_column=False) for line in lines],
        min((line.decimals for line in lines if line.decimals is not None), default=None),
        [_assumed_words(unsaid, logged, assumed)] if unsaid else [],
        lines,
        longest_prompt,
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


def with_sampler_logprobs(
    trainer: Sequence[np.ndarray], sampler: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Both columns without the tokens whose sampler logprob is NaN, and the positions of the others, [C]."""
    positions = [np.flatnonzero(~np.isnan(s)) for s in sampler]
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


def _taken(rollout: LoggedRollout, index: int, version: int | None) -> Rollout | None:
    """The rollout with the logprobs of one weight version; None where no token is left."""
    logprobs, span = rollout.logprobs, rollout.weight_span or (0, 0)
    if version is not None and rollout.token_versions is not None:
        logprobs = np.where(rollout.token_versions == version, logprobs, np.float32(np.nan))
    elif version is not None and span != (version, version):
        return None
    if np.isnan(logprobs).all():
        return None
    shown = span[0] if version is None else version
    return Rollout.of_one_turn(index, 0, rollout.prompt_ids, rollout.completion_ids, logprobs, "", shown)
