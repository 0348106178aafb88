"""The audit: how the log-probabilities of a sampler and of a trainer differ.

The rollouts are drawn or read from a log, and the trainer scores them. The result is one report.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ..engine.display.progress import silent
from ..engine.tasks.tokenizer import Tokenizer
from ..model.checkpoint import DTYPES, check_weights, resolve_model
from ..model.config import ModelConfig
from ..model.weight_files import unread_files
from ..model.weights import Layout
from .changes_since import changes_since, fingerprint, read_audit, settings_of
from .compare import Comparison, Rollouts, compare_engines, compare_log
from .conclusion.conclude import concluded
from .config import AuditConfig, check
from .drawing import SUMS, draw, requests
from .engines.audited_model import AuditedModel, audited_model
from .engines.engine import Engine
from .engines.engine_settings import machine_settings
from .engines.generation_config import not_obeyed
from .engines.make import device_of, library_errors, make_engines, tiles_of
from .figures.batch_invariance import batch_invariance
from .figures.full_vocab import compare_full_vocab
from .hypotheses.log_causes import model_adapters, other_checkpoints
from .hypotheses.other_scores import ModelAdapters, Scorer
from .logs.scan import Log, scan_log
from .operations.other_checkpoint import compare_folders
from .operations.plain_operations import Checkpoint
from .report import Measurements, Report
from .sections import BatchInvariance, EngineSection
from .settings import Source, assumed


@dataclass(frozen=True)
class _OfLog:
    """What is read before a model is loaded, where the sampler is a log."""

    log: Log
    others: tuple[Path, ...]  # checkpoints that may have drawn it
    adapters: ModelAdapters | None


@dataclass(frozen=True)
class _Setup:
    """What an audit computes with."""

    cfg: AuditConfig
    folders: list[Path]  # of the sampler's model and of the trainer's
    model: AuditedModel  # of the sampler
    tokenizer: Tokenizer
    device: torch.device
    sampler: Engine | None  # None where it is a log
    trainer: Engine
    stage: Callable[[str], None]
    log: _OfLog | None  # None where the sampler is an engine


def audit(cfg: AuditConfig, stage: Callable[[str], None] = silent) -> Report:
    """Run an audit. stage: is called with what begins now, in words. Raises ValueError for bad input."""
    check(cfg)
    past = read_audit(cfg.against) if cfg.against else None
    setup = _set_up(cfg, stage)
    if setup.log:
        measured = _audit_log(setup, setup.log)
    else:
        measured = _audit_engine(setup, setup.sampler)
    if past:
        measured = replace(measured, against=changes_since(past, _settings(measured), measured.figures))
    return concluded(measured, cfg.tolerances)


def _settings(measured: Measurements) -> dict[str, str]:
    """The settings of an audit, as its fingerprint is of them."""
    sides = {"sampler": measured.sampler, "trainer": measured.trainer} | vars(measured.dtypes)
    return settings_of(sides, measured.assumed.versions, measured.engines.engine_settings)


def _set_up(cfg: AuditConfig, stage: Callable[[str], None]) -> _Setup:
    folders = [resolve_model(name) for name in (cfg.model, cfg.trainer_model or cfg.model)]
    cfg = _with_trainer_of(cfg, folders[1])
    model = _model(cfg, *folders)
    tokenizer = Tokenizer(folders[0], model.vocab_size)
    for folder in dict.fromkeys(folders) if model.config else ():
        check_weights(folder, Layout(ModelConfig.from_file(folder)))
    device = device_of(cfg)
    log = _read(cfg, model, folders[1], stage) if cfg.reads_log else None
    stage(f"loading {cfg.trainer if cfg.reads_log else f'{cfg.sampler} and {cfg.trainer}'}")
    with library_errors(cfg, "start"):
        sampler, trainer = make_engines(cfg, folders, device)
    return _Setup(cfg, folders, model, tokenizer, device, sampler, trainer, stage, log)


def _with_trainer_of(cfg: AuditConfig, folder: Path) -> AuditConfig:
    """The settings for a model's family: of one that zerokl has no decoder of, transformers scores a log.

    A trainer that was named stays, and is refused where it cannot compute.
    """
    if not cfg.reads_log or "trainer" in cfg.model_fields_set or audited_model(folder, ()).config:
        return cfg
    return cfg.model_copy(update={"trainer": "hf"})


def _read(cfg: AuditConfig, model: AuditedModel, folder: Path, stage: Callable[[str], None]) -> _OfLog:
    """Read the log and what may have drawn it: what is wrong there is told before a model is loaded."""
    stage(f"reading {cfg.sampler}")
    if cfg.adapter and not model.config:
        raise ValueError(f"audit: --adapter merges with zerokl's decoder. {model.refusal}; leave it out")
    others, adapters = other_checkpoints(cfg.checkpoints, folder), model_adapters(cfg.adapter, folder)
    log = scan_log(
        Path(cfg.sampler),
        model.vocab_size,
        model.max_positions,
        cfg.weight_version,
        cfg.format,
        cfg.n,
        cfg.sampling_params,
        cfg.given_params is not None,
    )
    return _OfLog(log, others, adapters)


def _audit_log(setup: _Setup, given: _OfLog) -> Measurements:
    """Compare a log with the trainer's model."""
    cfg, log = setup.cfg, given.log
    scorer = Scorer(
        setup.trainer,
        setup.folders[1],
        DTYPES[cfg.dtypes.dtype],
        DTYPES[cfg.dtypes.head_dtype],
        setup.device,
        setup.tokenizer,
        tiles_of(cfg),
        given.others,
        given.adapters,
        None if setup.model.config else setup.model,
        cfg.knobs,
        cfg.sampler_dtype,
    )
    source = Source(log=cfg.sampler, weight_version=log.rollouts[0][0].weight_version)
    with library_errors(cfg, "compare"):
        comparison = compare_log(log.rollouts, setup.tokenizer, log, scorer, setup.stage)
    return _measured(setup, log.rollouts, source, comparison, [*log.notes, *_refused(setup.model)])


def _audit_engine(setup: _Setup, sampler: Engine) -> Measurements:
    """Let the sampler draw, and compare it with the trainer."""
    cfg, tokenizer, stage = setup.cfg, setup.tokenizer, setup.stage
    stage(f"drawing {cfg.n} completions with {sampler.name}")
    redraw = partial(draw, cfg, sampler, tokenizer, setup.model.max_positions)
    with library_errors(cfg, "draw"):
        rollouts = redraw()
    checkpoints = _checkpoints(cfg, setup.folders) if setup.model.config else ()
    source = Source(seed=cfg.seed, max_tokens=cfg.max_tokens, prompts=cfg.prompts or SUMS)
    vocab = invariance = None
    with library_errors(cfg, "compare"):
        comparison = compare_engines(sampler, setup.trainer, rollouts, tokenizer, redraw, checkpoints, stage)
        if cfg.full_vocab:
            stage("comparing the whole vocabulary")
            vocab = compare_full_vocab(sampler, setup.trainer, rollouts)
        if cfg.batch_invariance:
            invariance = _batch_invariance(setup, sampler)
    if cfg.trainer_model and not setup.model.config:
        difference = compare_folders(*(audited_model(x, ()) for x in setup.folders))
        comparison = replace(comparison, trace=replace(comparison.trace, checkpoints=difference))
    notes = not_obeyed(setup.folders[0], sampler.name)
    measured = _measured(setup, rollouts, source, comparison, notes)
    return replace(measured, full_vocab=vocab, batch_invariance=invariance)


def _batch_invariance(setup: _Setup, sampler: Engine) -> BatchInvariance:
    prompts, max_tokens = requests(setup.cfg, setup.tokenizer, setup.model.max_positions)
    return batch_invariance(
        sampler,
        prompts,
        setup.cfg.batch_invariance,
        max_tokens,
        setup.tokenizer.stop_ids,
        setup.model.max_positions,
        setup.stage,
    )


def _measured(
    setup: _Setup, rollouts: Rollouts, source: Source, comparison: Comparison, log_notes: list[str]
) -> Measurements:
    cfg, sampler, trainer = setup.cfg, setup.sampler, setup.trainer
    sides = {"sampler": sampler.name if sampler else cfg.sampler, "trainer": trainer.name}
    assumptions = assumed(cfg.dtypes, [params for _, params in rollouts], setup.device.type, source)
    engine_settings = ({"sampler": sampler.settings()} if sampler else {}) | {
        "trainer": trainer.settings(),
        "machine": machine_settings(setup.device),
    }
    settings = settings_of(sides | vars(cfg.dtypes), assumptions.versions, engine_settings)
    return Measurements(
        model=str(setup.folders[0]),
        trainer_model=str(setup.folders[1]) if cfg.trainer_model else None,
        **sides,
        dtypes=cfg.dtypes,
        engines=EngineSection(
            weight_version=rollouts[0][0].weight_version,
            torch=torch.__version__,
            device=setup.device.type,
            engine_settings=engine_settings,
            settings_fingerprint=fingerprint(settings),
        ),
        log_notes=[*log_notes, *_unread(setup.folders)],
        assumed=assumptions,
        **vars(comparison),
    )


def _refused(model: AuditedModel) -> list[str]:
    """That transformers scored a log in zerokl's place, and why, as a note; none where zerokl scored it."""
    if model.config:
        return []
    reason = model.refusal.removeprefix("model: ").partition("; ")[0]
    return [f"transformers scored this log, not zerokl's decoder: {reason}."]


def _unread(folders: Sequence[Path]) -> list[str]:
    """A note about each folder with files of weights that nobody read, which may be of another step."""
    unread = {folder: ", ".join(unread_files(folder)) for folder in folders}
    return [
        f"{folder} also holds {names}, which was not read; where it is stale, an engine that prefers it has "
        "other weights"
        for folder, names in unread.items()
        if names
    ]


def _model(cfg: AuditConfig, folder: Path, trainer_folder: Path) -> AuditedModel:
    """The sampler's model. Raises ValueError for two models of different vocabularies."""
    # vLLM draws and scores with any family that it has; hypotheses on a log compute with transformers.
    engines = [cfg.trainer] if cfg.reads_log else [x for x in (cfg.sampler, cfg.trainer) if x != "vllm"]
    model, other = (audited_model(x, engines) for x in (folder, trainer_folder))
    if model.vocab_size != other.vocab_size:
        raise ValueError(
            f"audit: {folder} has a vocabulary of {model.vocab_size}, {trainer_folder} of "
            f"{other.vocab_size}; "
            "tokens of one have no probability under the other"
        )
    config = model.config if other.config else None
    return replace(model, max_positions=min(model.max_positions, other.max_positions), config=config)


def _checkpoints(cfg: AuditConfig, folders: Sequence[Path]) -> tuple[Checkpoint, ...]:
    """The checkpoints of the sampler and of the trainer, in their dtypes.

    With a model for each, a third one is the trainer's in the sampler's dtype.
    """
    dtypes = DTYPES[cfg.dtypes.sampler_dtype], DTYPES[cfg.dtypes.dtype]
    sampler = Checkpoint.load(folders[0], dtypes[0])
    if not cfg.trainer_model:
        return sampler, sampler if dtypes[0] == dtypes[1] else Checkpoint.load(folders[1], dtypes[1])
    trainer = Checkpoint.load(folders[1], dtypes[1])
    return sampler, trainer, trainer if dtypes[0] == dtypes[1] else Checkpoint.load(folders[1], dtypes[0])
