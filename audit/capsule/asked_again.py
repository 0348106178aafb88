"""`zerokl capsule replay`: a capsule's engines are asked again, and what has changed since is said."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...engine.display.progress import silent
from ...files.installed import needs_torch
from ...verify.difference import first_unequal
from ..changes_since import Change, changes
from ..conclusion.outcome import Tolerances
from ..config import SAMPLERS, TRAINERS, AuditConfig
from ..settings import versions
from .capsule import Capsule, Header
from .column_pairs import Column, Pair, compare
from .folder_hashes import file_hashes, model_differences, weight_hashes
from .make_capsule import check_one_vllm


@dataclass(frozen=True)
class Replay:
    """What a replay says."""

    capsule: str
    changes: list[Change]  # settings, dtypes and versions that are others now
    model: list[str]  # what is another in the model, one line each
    drawn: list[str]  # completions that were drawn again with other ids, one line each
    pairs: list[Pair]
    tolerances: Tolerances

    @property
    def passed(self) -> bool:
        """Whether the exit code is 0.

        Without a tolerance every engine that was asked again must have the capsule's bits. With one, every
        pair of columns must lie within it.
        """
        judged = [pair for pair in self.pairs if pair.gate or self.tolerances.given]
        return not self.drawn and all(pair.holds(self.tolerances) for pair in judged)

    @property
    def words(self) -> str:
        """The outcome in words."""
        if not self.passed:
            return "Beyond the tolerance" if self.tolerances.given else "Not equal to the bit"
        gates = [pair for pair in self.pairs if pair.gate]
        if gates and all(pair.figures.equal for pair in gates):
            return "Equal to the bit"
        return "Within the tolerance" if self.pairs and self.tolerances.given else "Whole"


def replay(
    capsule: Capsule,
    name: str,
    sampler: str,
    trainer: str,
    cfg: AuditConfig,
    tolerances: Tolerances,
    stage: Callable[[str], None] = silent,
) -> Replay:
    """Ask engines again. sampler, trainer: their names, or "" for the capsule's own column.

    cfg: model, dtypes and device; n and prompts do not count. Raises ValueError for bad input.
    """
    _check(capsule, sampler, trainer, cfg, tolerances)
    header, rollouts = capsule.header, capsule.rollouts
    logged = [rollout.logprobs for rollout in rollouts]
    scored = [r.trainer_logprobs for r in rollouts] if capsule.has_trainer else None
    settings: dict[str, str] = {}
    pairs, others = [], []
    sampler_now: Column = logged
    if sampler:
        stage(f"asking {sampler} again")
        sampler_now, others, settings = _sampler_now(capsule, sampler, cfg)
        pairs.append(compare("sampler, then and now", logged, sampler_now, rollouts, gate=True))
    trainer_now = scored
    if trainer:
        from .asked_engines import score_again

        stage(f"asking {trainer} again")
        computed = score_again(cfg.model_copy(update={"trainer": trainer}), "trainer", rollouts)
        trainer_now, settings = computed.logprobs, settings | computed.settings
        if scored is not None:
            pairs.append(compare("trainer, then and now", scored, trainer_now, rollouts, gate=True))
    if trainer_now is not None:
        pairs.append(compare("sampler and trainer, now", sampler_now, trainer_now, rollouts, not pairs))
    return Replay(
        name,
        _changes(header, settings, cfg),
        _of_model(header, cfg.model),
        others,
        pairs,
        tolerances if tolerances.given else header.bounds.tolerances,
    )


def check_columns(capsule: Capsule, name: str) -> Replay:
    """A capsule's own two columns within its own bounds. No model computes, and nothing can have changed."""
    pairs = []
    if capsule.has_trainer:
        columns = zip(*((r.logprobs, r.trainer_logprobs) for r in capsule.rollouts), strict=True)
        pairs = [compare("sampler and trainer, then", *columns, capsule.rollouts, gate=False)]
    return Replay(name, [], [], [], pairs, capsule.header.bounds.tolerances)


def _check(capsule: Capsule, sampler: str, trainer: str, cfg: AuditConfig, tolerances: Tolerances) -> None:
    """Raise ValueError for what cannot be asked, before anything is computed."""
    if not sampler and not trainer:
        raise ValueError("capsule: name the engines that are asked again: --sampler, --trainer or both")
    # A log's sampler is asked to score, which the engines that only draw cannot.
    takes = SAMPLERS if capsule.header.drawn else {**TRAINERS, "native": ""}
    for side, name, known in (("sampler", sampler, takes), ("trainer", trainer, TRAINERS)):
        if name and name not in known:
            raise ValueError(f"capsule: {side} {name} is not known; choose {', '.join(known)}")
    check_one_vllm(sampler, trainer)
    if not cfg.model:
        raise ValueError("capsule: it names no model; name one with --model")
    if not Path(cfg.model).is_dir() and cfg.model == capsule.header.model and cfg.model.count("/") != 1:
        raise ValueError(f"capsule: its model, {cfg.model}, is not here; name it with --model")
    tolerances.check()
    needs_torch(f"capsule: --{'sampler' if sampler else 'trainer'}")


def _sampler_now(
    capsule: Capsule, sampler: str, cfg: AuditConfig
) -> tuple[list[np.ndarray], list[str], dict[str, str]]:
    """The sampler's column now, what it drew otherwise, and its settings.

    The engine that drew the capsule draws again, with the same seed. Another one, or the engine of a log,
    scores the ids.
    """
    from .asked_engines import as_sampler, draw_again, score_again

    cfg = as_sampler(cfg, sampler)
    header, rollouts = capsule.header, capsule.rollouts
    if header.drawn is None or sampler != header.sampler:
        computed = score_again(cfg, "sampler", rollouts)
        return computed.logprobs, [], computed.settings
    prompts = [rollout.prompt_ids for rollout in rollouts]
    computed = draw_again(cfg, header.drawn, prompts, rollouts[0].sampling_params)
    others, columns = [], []
    for index, (rollout, ids, logprobs) in enumerate(
        zip(rollouts, computed.completions, computed.logprobs, strict=True)
    ):
        parted = first_unequal(rollout.completion_ids, ids)
        if parted is not None:
            others.append(f"completion {index}: other tokens from position {parted} on")
        # The token at which they part was drawn from the same distribution; those after it were not.
        column = np.full(len(rollout.completion_ids), np.nan, np.float32)
        column[:parted] = logprobs[:parted]
        columns.append(column)
    return columns, others, computed.settings


def _changes(header: Header, settings: dict[str, str], cfg: AuditConfig) -> list[Change]:
    """The settings and versions that are others now. Those of a side that was not asked do not count."""
    then = {f"version of {name}": value for name, value in header.versions.items()} | header.dtypes
    now = {f"version of {name}": value for name, value in versions().items()}
    now |= vars(cfg.dtypes) if header.dtypes else {}
    sides = {name.partition(":")[0] for name in settings} & {n.partition(":")[0] for n in header.settings}
    then |= {n: v for n, v in header.settings.items() if n.partition(":")[0] in sides}
    now |= {n: v for n, v in settings.items() if n.partition(":")[0] in sides}
    return [replace(c, setting=c.setting.replace("_", " ")) for c in changes(then, now)]


def _of_model(header: Header, model: str) -> list[str]:
    """What differs between the capsule's model and the one that computes now."""
    if not header.weights:
        return ["the capsule does not know its weights"]
    if not Path(model).is_dir():
        return [f"{model} is no local folder, so its weights were not compared"]
    return model_differences(
        header.tensors, header.weights, weight_hashes(Path(model)), header.files, file_hashes(Path(model))
    )
