"""What may have gone wrong with a log: the hypotheses and the checks of its ids, as a part of the report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from ...engine.display.progress import silent
from ...engine.rollout.types import Rollout
from ...kernels.sampling_params import SamplingParams
from ...model.adapters import AdapterLayout, adapted_layout
from ...model.checkpoint import check_weights, resolve_model
from ...model.config import ModelConfig
from ...model.peft import CONFIG, read_adapter, read_adapter_config, stored_lora
from ...model.weights import Layout
from ..engines.audited_model import audited_model
from ..faults.all_faults import in_draws, with_model
from ..faults.fault import LogFault
from ..faults.model import another_dtype
from ..figures.drawn_from import UNDECLARED_CUT, check
from ..figures.repeats import Drawn, group_of
from ..formats.record import LoggedRollout
from ..formats.registry import natural_order
from ..knobs.column import KnobModel, with_knobs
from ..log_section import TrainerColumn
from .column_causes import declared, said
from .compared import apart
from .evidence import Evidence
from .fit import explain
from .judgement import EXACT
from .log_checks import check_log, drawn_parts
from .other_scores import ModelAdapters, Scorer
from .scorable_lines import Line
from .tried import Tried

# Lines whose random numbers are compared.
_STREAMS = 64


@dataclass(frozen=True)
class LogCauses:
    """The hypotheses about a log, the faults in its ids, and the same of its own trainer column."""

    hypotheses: Tried
    log_faults: list[LogFault]
    trainer_column: TrainerColumn | None


def log_causes(
    rollouts: Sequence[tuple[Rollout, SamplingParams]],
    scored: Sequence[np.ndarray],
    lines: Sequence[LoggedRollout],
    scorer: Scorer,
    longest_prompt: int = 0,
    stage: Callable[[str], None] = silent,
) -> LogCauses:
    """Why a log and a model differ.

    scored: the trainer's logprobs [C] of each rollout. lines: what the log says beside them. longest_prompt:
    of the whole log, where `rollouts` are a part of it. stage: see audit.
    """
    evidence = Evidence(
        [
            declared(
                Line(i, r.prompt_ids, r.completion_ids, r.logprobs, scores, params, *said(line)),
                line.decimals,
            )
            for i, ((r, params), scores, line) in enumerate(zip(rollouts, scored, lines, strict=True))
        ],
        scorer,
        longest_prompt=max(longest_prompt, *(len(r.prompt_ids) for r, _ in rollouts), 0),
    )
    parts = drawn_parts(lines, scorer.tokenizer)
    evidence = replace(evidence, lines=list(map(_drawn_only, evidence.lines, parts)))
    trainer_column, faults = None, with_model(scorer.has_decoder)
    if any(x.trainer_logprobs is not None and not np.isnan(x.trainer_logprobs).all() for x in lines):
        column = explain(_of_trainer(evidence, lines), faults, stage)
        distribution = check(_both_columns(rollouts, lines))
        trainer_column = TrainerColumn(**vars(column), distribution=distribution)
    hypotheses = _in_their_dtype(explain(evidence, faults, stage), evidence, lines)
    knob_model = KnobModel(scorer.folder, scorer.device, scorer.knobs, scorer.sampler_dtype)
    hypotheses = with_knobs(hypotheses, evidence, knob_model, stage)
    if trainer_column:
        trainer_column = with_knobs(trainer_column, _of_trainer(evidence, lines), knob_model, stage)
    if trainer_column and hypotheses.is_within_rounding and not trainer_column.is_within_rounding:
        trainer_column = _without_undeclared_cut(trainer_column)
    log_faults = check_log(lines, scorer.tokenizer)
    if hypotheses.is_within_rounding:
        rows = scorer.rows(_first(evidence))
        # A stream that lines share may also double lines, so it stands first.
        in_them = (fault.shown(rows) for fault in in_draws())
        log_faults = [*(fault for fault in in_them if fault), *log_faults]
    return LogCauses(hypotheses, log_faults, trainer_column)


def _in_their_dtype(tried: Tried, evidence: Evidence, lines: Sequence[LoggedRollout]) -> Tried:
    """Another dtype than the audit's is no fault of the sampler where the log's trainer column has it too."""
    if not tried.best or tried.best.name != another_dtype.FAULT.name or not tried.is_rounding:
        return tried
    left = before = 0.0
    for x, line in zip(evidence.lines, lines, strict=True):
        if line.trainer_logprobs is not None:
            both = np.stack([apart(x, line.trainer_logprobs), apart(x, x.scored)])
            a, b = both[:, ~np.isnan(both).any(0)].sum(1)
            left, before = left + a, before + b
    if not before or left > EXACT * before:
        return tried
    return replace(tried, best=None, also=[], common_dtype=tried.best.what)


def _without_undeclared_cut(column: TrainerColumn) -> TrainerColumn:
    """The column, which does not lack a cut that the log does not declare: the model has none."""
    fault = column.distribution.fault
    if not fault or fault.kind != UNDECLARED_CUT:
        return column
    return replace(column, distribution=replace(column.distribution, fault=None))


def _drawn_only(line: Line, part: slice) -> Line:
    """The line without the numbers of tokens that nobody drew."""
    undrawn = np.ones(len(line.logged), bool)
    undrawn[part] = False
    return replace(line, logged=np.where(undrawn, np.float32(np.nan), line.logged)) if undrawn.any() else line


def _first(evidence: Evidence) -> Evidence:
    """The first lines: those of one batch stand together."""
    return replace(evidence, lines=evidence.lines[:_STREAMS])


def _both_columns(
    rollouts: Sequence[tuple[Rollout, SamplingParams]], lines: Sequence[LoggedRollout]
) -> list[Drawn]:
    """The log's own two columns, of the tokens that have both."""
    drawn = []
    for (rollout, params), line in zip(rollouts, lines, strict=True):
        if line.trainer_logprobs is not None:
            places = np.flatnonzero(~(np.isnan(rollout.logprobs) | np.isnan(line.trainer_logprobs)))
            columns = rollout.logprobs[places], line.trainer_logprobs[places]
            drawn.append(Drawn(group_of(line), np.array(rollout.completion_ids), places, *columns, params))
    return drawn


def _of_trainer(evidence: Evidence, lines: Sequence[LoggedRollout]) -> Evidence:
    """The lines with the log's trainer column in place of the sampler's."""
    return replace(
        evidence,
        side="trainer",
        lines=[
            declared(replace(line, logged=logged.trainer_logprobs), logged.trainer_decimals)
            for line, logged in zip(evidence.lines, lines, strict=True)
            if logged.trainer_logprobs is not None
        ],
    )


def other_checkpoints(names: Sequence[str], folder: Path) -> tuple[Path, ...]:
    """The checkpoints that were named, each a model, or a folder of models in the order of their numbers.

    folder: the model of the audit, which is left out. Raises ValueError for one of another architecture.
    """
    folders = []
    for name in names:
        inside = (
            [config.parent for config in Path(name).glob("**/config.json")] if Path(name).is_dir() else []
        )
        inside = [x for x in inside if x != Path(name)]
        folders += [resolve_model(name)] if not inside else sorted(inside, key=natural_order)
    folders = [x for x in dict.fromkeys(folders) if x.resolve() != folder.resolve()]
    for other in folders:
        if different := _other_shape(folder, other):
            raise ValueError(
                f"audit: --checkpoints {other} has another {different} than {folder}; its weights cannot "
                "have drawn this log"
            )
        if config := audited_model(other, ()).config:
            check_weights(other, Layout(config))
    return tuple(folders)


def model_adapters(names: Sequence[str], folder: Path) -> ModelAdapters | None:
    """The adapters that were named, each a folder of PEFT, or a folder of such in the order of their numbers.

    folder: the model of the audit, into which the first one is merged. None where none is named. Raises
    ValueError for a folder that holds no plain LoRA, and for a base that is not the model's.
    """
    folders: list[Path] = []
    for path in map(Path, names):
        inside = [path] if (path / CONFIG).exists() else [x.parent for x in path.glob(f"**/{CONFIG}")]
        if not inside:
            raise ValueError(f"audit: --adapter {path} holds no {CONFIG}; give the folder of a PEFT adapter")
        folders += sorted(inside, key=natural_order)
    if not folders:
        return None
    first, *others = dict.fromkeys(folders)
    if not (name := read_adapter_config(first).base):
        raise ValueError(f"audit: --adapter {first} names no base; write base_model_name_or_path in {CONFIG}")
    base = resolve_model(name)
    if base.resolve() == folder.resolve():
        raise ValueError(
            f"audit: {folder} is the base of {first}; give the merged model (zerokl merge {first})"
        )
    if different := _other_shape(folder, base):
        raise ValueError(f"audit: {base}, the base of {first}, has another {different} than {folder}")
    config = ModelConfig.from_file(folder)
    for adapter in (first, *others):
        lora = stored_lora(adapter)
        read_adapter(adapter, AdapterLayout(adapted_layout(config, lora), lora))
    check_weights(base, Layout(ModelConfig.from_file(base)))
    return ModelAdapters(base, first, tuple(others))


def _other_shape(a: Path, b: Path) -> str | None:
    """The first field in which two configs differ, but for the file as it was read; None where none does."""
    first, second = audited_model(a, ()), audited_model(b, ())
    if first.config is None or second.config is None:
        x, y = first.raw, second.raw
        return next((name for name in {**x, **y} if x.get(name) != y.get(name)), None)
    names = [f.name for f in fields(first.config) if f.name not in ("raw", "max_positions")]
    return next((n for n in names if getattr(first.config, n) != getattr(second.config, n)), None)
