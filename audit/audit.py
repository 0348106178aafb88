"""The audit: how the log-probabilities of a sampler and of a trainer differ.

The rollouts are drawn or read from a log, and the trainer scores them. Then one sequence is traced through
both engines. The result is one report (audit.json).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..engine.rollout.types import GenerationParams, Rollout
from ..engine.runs.progress import silent
from ..engine.tasks.tokenizer import Tokenizer
from ..kernels.sampling_params import SamplingParams
from ..model.checkpoint import check_weights, resolve_model
from ..model.config import ModelConfig
from ..model.weights import Layout
from .changes_since import compare_audits, fingerprint, read_audit
from .columns import rounding
from .conclusion.conclude import concluded
from .conclusion.outcome import Outcome
from .config import SAMPLERS, AuditConfig, check, dtype_of
from .engines.engine import Engine
from .engines.make import device_of, library_errors, make_engines
from .engines.settings import machine_settings
from .figures.bands import band_figures
from .figures.batch_invariance import batch_invariance, own_invariance
from .figures.drawn_from import check as check_distribution
from .figures.full_vocab import whole_distributions
from .figures.measure import measure, worst_tokens
from .figures.repeats import Drawn, group_of
from .hypotheses.evidence import Scorer
from .hypotheses.log_causes import log_causes, other_checkpoints
from .hypotheses.log_checks import DOUBLED
from .logs.scan import Log, scan_log, with_sampler_logprobs
from .operations.locate import locate
from .operations.operations import Checkpoint
from .page.token_texts import strip, with_text
from .settings import assumed

Rollouts = Sequence[tuple[Rollout, SamplingParams]]
# Tokens of the traced sequence at most, where there is a choice: a trace holds its logits over the
# vocabulary.
_TRACED_TOKENS = 1024


@dataclass(frozen=True)
class Audit:
    """The result of an audit. `report` is what audit.json holds."""

    report: dict[str, Any]

    @property
    def outcome(self) -> Outcome:
        """The one answer to "is it equal?"."""
        return self.report["outcome"]


def audit(cfg: AuditConfig, stage: Callable[[str], None] = silent) -> Audit:
    """Run an audit. stage: is called with what begins now, in words. Raises ValueError for bad input."""
    check(cfg)
    earlier = read_audit(cfg.against) if cfg.against else None
    folders = [resolve_model(name) for name in (cfg.model, cfg.trainer_model or cfg.model)]
    model = _model(*folders)
    tokenizer = Tokenizer(folders[0], model.vocab_size)
    for folder in dict.fromkeys(folders):
        check_weights(folder, Layout(ModelConfig.from_file(folder)))
    device = device_of(cfg)
    stage(f"loading {cfg.trainer if cfg.sampler not in SAMPLERS else f'{cfg.sampler} and {cfg.trainer}'}")
    with library_errors(cfg, "start"):
        sampler, trainer = make_engines(cfg, folders, device)
    log, redraw, checkpoints, scorer = None, None, (), None
    if sampler is None:
        stage(f"reading {cfg.sampler}")
        others = other_checkpoints(cfg.checkpoints, folders[1])
        dtype, head, *_ = map(dtype_of, cfg.dtypes().values())
        scorer = Scorer(trainer, folders[1], dtype, head, device, tokenizer, others)
        log = scan_log(
            Path(cfg.sampler),
            model.vocab_size,
            model.max_positions,
            cfg.weight_version,
            cfg.format,
            cfg.n,
            cfg.sampling_params,
            cfg.sampling_params_given,
        )
        rollouts = log.rollouts
        drawn = {"log": cfg.sampler, "weight_version": rollouts[0][0].weight_version}
    else:
        stage(f"drawing {cfg.n} completions with {sampler.name}")
        redraw = partial(_draw, cfg, sampler, tokenizer, model)
        with library_errors(cfg, "draw"):
            rollouts = redraw()
        checkpoints = _checkpoints(cfg, folders)
        prompts = cfg.prompts or "sums such as 3+14="
        drawn = {"seed": cfg.seed, "max_tokens": cfg.max_tokens, "prompts": prompts}
    report = {
        "model": str(folders[0]),
        "trainer_model": str(folders[1]) if cfg.trainer_model else None,
        "sampler": sampler.name if sampler else cfg.sampler,
        "trainer": trainer.name,
        **cfg.dtypes(),
        "weight_version": rollouts[0][0].weight_version,
        "torch": torch.__version__,
        "device": device.type,
        "logged": log.logged if log else None,
        "log_notes": log.notes if log else [],
        "assumed": assumed(cfg.dtypes(), [params for _, params in rollouts], device.type, drawn),
        "engine_settings": _engine_settings(sampler, trainer, device),
    }
    report["settings_fingerprint"] = fingerprint(report)
    with library_errors(cfg, "compare"):
        report |= compare(trainer, rollouts, tokenizer, sampler, redraw, checkpoints, log, stage, scorer)
        report |= _asked_for(cfg, sampler, trainer, rollouts, tokenizer, model, stage)
    if earlier:
        report["against"] = compare_audits(report, earlier, cfg.against)
    return Audit(concluded(report, cfg.tolerances))


def _engine_settings(
    sampler: Engine | None, trainer: Engine, device: torch.device
) -> dict[str, dict[str, str]]:
    """The settings of the engines and of the machine, for JSON."""
    engines = ({"sampler": sampler.settings()} if sampler else {}) | {"trainer": trainer.settings()}
    return engines | {"machine": machine_settings(device)}


def _asked_for(
    cfg: AuditConfig,
    sampler: Engine,
    trainer: Engine,
    rollouts: Rollouts,
    tokenizer: Tokenizer,
    model: ModelConfig,
    stage: Callable[[str], None],
) -> dict[str, Any]:
    """What an audit compares only where it is asked to: whole distributions, and the sampler with itself."""
    report = {}
    if cfg.full:
        stage("comparing the whole distributions")
        report["whole"] = whole_distributions(sampler, trainer, rollouts)
    if cfg.own:
        prompts, max_tokens = _requests(cfg, tokenizer, model)
        report["batch_invariance"] = batch_invariance(
            sampler, prompts, cfg.own, max_tokens, tokenizer.stop_ids, model.max_positions, stage
        )
    return report


def compare(
    trainer: Engine,
    rollouts: Rollouts,
    tokenizer: Tokenizer,
    sampler: Engine | None = None,
    redraw: Callable[[], Rollouts] | None = None,
    checkpoints: Sequence[Checkpoint] = (),
    log: Log | None = None,
    stage: Callable[[str], None] = silent,
    scorer: Scorer | None = None,
) -> dict[str, Any]:
    """The report on the trainer's logprobs of rollouts, beside the logprobs of their sampler.

    sampler: the engine that drew them, where it is at hand; then both engines are traced. redraw: draws the
    rollouts again from the same seeds, after the sampler has dropped its caches. Other bits then show that a
    cache was stale. checkpoints: see _checkpoints; each operation is judged by them. log: where the rollouts
    come from, if they were logged. stage: see audit. scorer: the trainer's model; with a log, hypotheses are
    tried on it.
    """
    stage(f"scoring {len(rollouts)} completions with {trainer.name}")
    scored, drawn = _score(trainer, rollouts), [r.logprobs for r, _ in rollouts]
    trainer_logprobs, sampling_logprobs, positions = (
        with_sampler_logprobs(scored, drawn) if log else (scored, drawn, None)
    )
    worst = worst_tokens(trainer_logprobs, sampling_logprobs)
    stage("scoring some of them alone and token by token")
    if positions:
        worst = [w | {"position": int(positions[w["sequence"]][w["position"]])} for w in worst]
    report = {
        **measure(trainer_logprobs, sampling_logprobs),
        "worst": [with_text(w, rollouts, tokenizer) for w in worst],
        "strip": strip(rollouts, scored, tokenizer, worst),
        "corrections": band_figures(trainer_logprobs, sampling_logprobs),
        "own_invariance": {
            name: own_invariance(engine, rollouts, drawn=engine is sampler)
            for name, engine in _by_name(sampler, trainer).items()
        },
    }
    if log and (rounded := rounding(trainer_logprobs, sampling_logprobs, log.tolerances, log.decimals)):
        report["rounding"] = rounded
    if log and scorer:
        stage("trying what may explain a difference")
        report |= log_causes(rollouts, scored, log.lines, scorer)
    if log:
        doubled = any(fault["name"] == DOUBLED for fault in report.get("log_findings", []))
        report["distribution"] = check_distribution(_as_drawn(rollouts, scored, log), doubled)
    if sampler is None:
        return report
    stage("tracing every operation of one sequence in both engines")
    traced, params = rollouts[_traced(rollouts, worst)]
    report |= locate(sampler, trainer, traced.pair, params, checkpoints[:2], *checkpoints[2:])
    report["traced_outside"] = sampler.traced_outside
    if report["frac_equal"] < 1.0 and redraw is not None and sampler.drop_caches():
        stage("drawing again without the sampler's caches")
        again = redraw()
        report["frac_equal_without_caches"] = measure(_score(trainer, again), [r.logprobs for r, _ in again])[
            "frac_equal"
        ]
        report["stale_cache"] = any(
            a.completion_ids != b.completion_ids or a.logprobs.tobytes() != b.logprobs.tobytes()
            for (a, _), (b, _) in zip(rollouts, again, strict=True)
        )
    return report


def _as_drawn(rollouts: Rollouts, scored: Sequence[np.ndarray], log: Log) -> list[Drawn]:
    """The tokens of a log that have the sampler's logprobs, beside what the trainer gives them."""
    drawn = []
    for (rollout, params), own, line in zip(rollouts, scored, log.lines, strict=True):
        places = np.flatnonzero(~np.isnan(rollout.logprobs))
        ids = np.array(rollout.completion_ids)
        drawn.append(Drawn(group_of(line), ids, places, rollout.logprobs[places], own[places], params))
    return drawn


def _traced(rollouts: Rollouts, worst: Sequence[dict[str, Any]]) -> int:
    """The rollout that is traced: the one with the worst token, unless it is long; then the shortest."""
    lengths = [sum(map(len, r.pair)) for r, _ in rollouts]
    index = worst[0]["sequence"] if worst else 0
    return index if lengths[index] <= _TRACED_TOKENS else lengths.index(min(lengths))


def _model(folder: Path, trainer_folder: Path) -> ModelConfig:
    """The config of the sampler's model. Raises ValueError for two models of different vocabularies."""
    model, other = ModelConfig.from_file(folder), ModelConfig.from_file(trainer_folder)
    if model.vocab_size != other.vocab_size:
        raise ValueError(
            f"audit: {folder} has a vocabulary of {model.vocab_size}, {trainer_folder} of "
            f"{other.vocab_size}; "
            "tokens of one have no probability under the other"
        )
    return replace(model, max_positions=min(model.max_positions, other.max_positions))


def _checkpoints(cfg: AuditConfig, folders: Sequence[Path]) -> tuple[Checkpoint, ...]:
    """The checkpoints of the sampler and of the trainer, in their dtypes.

    With a model for each, a third one is the trainer's in the sampler's dtype.
    """
    dtypes = [dtype_of(cfg.dtypes()[name]) for name in ("sampler_dtype", "dtype")]
    sampler = Checkpoint.load(folders[0], dtypes[0])
    if not cfg.trainer_model:
        return sampler, sampler if dtypes[0] == dtypes[1] else Checkpoint.load(folders[1], dtypes[1])
    trainer = Checkpoint.load(folders[1], dtypes[1])
    return sampler, trainer, trainer if dtypes[0] == dtypes[1] else Checkpoint.load(folders[1], dtypes[0])


def _by_name(sampler: Engine | None, trainer: Engine) -> dict[str, Engine]:
    """The engines by name. Two engines of one name get their side as well."""
    if sampler in (None, trainer):
        return {trainer.name: trainer}
    sides = {"sampler": sampler, "trainer": trainer}
    return {e.name if sampler.name != trainer.name else f"{e.name} ({side})": e for side, e in sides.items()}


def _draw(cfg: AuditConfig, sampler: Engine, tokenizer: Tokenizer, model: ModelConfig) -> Rollouts:
    prompts, max_tokens = _requests(cfg, tokenizer, model)
    generation_params = GenerationParams(cfg.sampling_params.check(), 1, max_tokens, tokenizer.stop_ids)
    repeated = [prompts[i % len(prompts)] for i in range(cfg.n)]
    return [(r, cfg.sampling_params) for r in sampler.generate(repeated, generation_params, cfg.seed)]


def _requests(cfg: AuditConfig, tokenizer: Tokenizer, model: ModelConfig) -> tuple[list[list[int]], int]:
    """The prompts, and the tokens that may follow the longest. Raises ValueError where none may."""
    prompts = [tokenizer.encode(p, cfg.chat) for p in _prompt_texts(cfg)]
    room = model.max_positions - max(map(len, prompts))
    if room < 1:
        raise ValueError(
            f"audit: a prompt of {model.max_positions - room} tokens leaves no room "
            f"in the context ({model.max_positions})"
        )
    return prompts, min(cfg.max_tokens, room)


def _prompt_texts(cfg: AuditConfig) -> list[str]:
    if not cfg.prompts:
        return [f"{a}+{b}=" for a in range(1, 9) for b in range(11, 19)]
    try:
        texts = [
            line for line in Path(cfg.prompts).read_text(encoding="utf-8-sig").split("\n") if line.strip()
        ]
    except UnicodeDecodeError as error:
        raise ValueError(f"audit: {cfg.prompts} is not UTF-8 ({error.reason})") from None
    except OSError as error:
        raise ValueError(f"audit: {cfg.prompts} cannot be read ({error.strerror})") from None
    if not texts:
        raise ValueError(f"audit: {cfg.prompts} holds no prompt")
    return texts


def _score(engine: Engine, rollouts: Rollouts) -> list[np.ndarray]:
    """The engine's logprobs of each rollout. Rollouts with equal sampling parameters are scored together."""
    scored: dict[int, np.ndarray] = {}
    for sampling_params in dict.fromkeys(params for _, params in rollouts):
        indices = [i for i, (_, params) in enumerate(rollouts) if params == sampling_params]
        pairs = [rollouts[i][0].pair for i in indices]
        scored |= zip(indices, engine.score(pairs, sampling_params), strict=True)
    return [scored[i] for i in range(len(rollouts))]
