"""What the hypotheses about a log say, in words."""

from ..figures.drawn_from import UNDECLARED_CUT
from ..finding import Finding
from ..hypotheses.tried import Row, Tried
from ..log_section import TrainerColumn
from ..report import Measurements
from ..sentence import begun


def log_notes(measured: Measurements) -> list[str]:
    """Faults that a log shows by itself, what its own trainer column is, and whether it carries a signal."""
    if measured.log is None:
        return []
    tried = measured.log.trainer_column
    texts = [f"In the log, {fault.name}: {fault.text} {fault.remedy}" for fault in measured.log.log_faults]
    if tried and not measured.columns_alone:
        texts.append(f"{_trainer_column(tried, True)} {_trainer_remedy(tried)}".strip())
    return [*texts, measured.log.signal.words()]


def _missing_cut(tried: TrainerColumn) -> Finding | None:
    """A cut that the trainer's column lacks. One that no line declares is a guess, below an exact cause."""
    missing = tried.distribution.fault
    if not missing or not missing.kind.startswith("trainer"):
        return None
    return None if missing.kind == UNDECLARED_CUT and tried.is_exact else missing


def _trainer_remedy(tried: TrainerColumn) -> str:
    """What to do about the fault that `_trainer_column` names; empty where it names none."""
    if missing := _missing_cut(tried):
        return missing.remedy
    return tried.best.remedy if tried.distance and not tried.is_rounding and tried.best else ""


def _trainer_column(tried: TrainerColumn, beside_model: bool) -> str:
    """What the model, or the sampler's column, says to the log's own trainer column."""
    judge = "the model" if beside_model else "the sampler's"
    distance = f"The log's trainer column differs from {judge} by {tried.distance:.3g} nats a token"
    if missing := _missing_cut(tried):
        return f"{distance}: {missing.text}"
    if tried.is_within_rounding:
        return "The log's trainer column is the model's, to within rounding."
    if row := tried.best:
        return f"{distance}, and {row.name} fits it: {row.what}{chosen_among(row)}."
    return f"{distance}, and no hypothesis fits it.{_sits(tried)}"


def _sits(tried: Tried) -> str:
    """Where the difference sits, as a sentence after another; empty where it is everywhere."""
    if not tried.where:
        return ""
    place = tried.where
    elsewhere = f", {place.odd_elsewhere} others" if place.odd_elsewhere else ", and no other token"
    return f" It sits in {place.words}: {place.odd} of these {place.tokens} tokens{elsewhere}."


def trainer_column_fault(measured: Measurements) -> Finding | None:
    """A named error of the log's own trainer column."""
    tried = measured.log and measured.log.trainer_column
    if not tried:
        return None
    missing, text = _missing_cut(tried), _trainer_column(tried, not measured.columns_alone)
    if missing:
        return None if measured.columns_alone else Finding(missing.kind, text, missing.remedy, True)
    if tried.best and not tried.is_rounding and not _sampler_is_nearer(measured):
        return Finding(f"the log's trainer column, {tried.best.name}", text, tried.best.remedy, True)
    if measured.columns_alone or tried.is_within_rounding or not measured.log.hypotheses.is_within_rounding:
        return None
    nearest = _nearest(tried)
    what = "The sampler's column is the model's, so the trainer's is at fault."
    return Finding("the log's trainer column", f"{text} {what} {begun(nearest.text)}", nearest.remedy, True)


def _sampler_is_nearer(measured: Measurements) -> bool:
    """Whether two columns alone are explained as well by a fault of the sampler's."""
    sampler, trainer = measured.log.hypotheses.best, measured.log.trainer_column.best
    return measured.columns_alone and sampler is not None and sampler.left <= 1.1 * trainer.left


def guilty_trainer(measured: Measurements) -> Finding | None:
    """The trainer's column where it alone is at fault: the sampler's is the model's, to within rounding.

    Of two columns alone, the trainer's is at fault where its fault explains what the sampler's cannot.
    """
    log = measured.log
    if not log or not log.trainer_column:
        return None
    named = trainer_column_fault(measured)
    if measured.columns_alone or log.hypotheses.is_within_rounding:
        return named
    return None if log.hypotheses.best else named


def chosen_among(row: Row) -> str:
    """How many candidates a hypothesis had, as a part of a sentence; empty where it had no choice."""
    if row.candidates == 1:
        return ""
    text = f", the best of {row.candidates:,} candidates"
    if row.left_by_chance < 1.0:
        text += f", which explain {1.0 - row.left_by_chance:.0%} of shuffled numbers"
    return text


def fitting(measured: Measurements) -> Finding | None:
    """What was tried on a log and explains its numbers."""
    row = measured.log and measured.log.hypotheses.best
    if not row:
        return None
    in_lines = f" in {row.lines} of {row.lines_tried} lines" if row.lines_tried > 1 else ""
    in_lines += " that were searched" if row.searched else ""
    sits = _sits(measured.log.hypotheses) if row.searched else ""
    also = measured.log.hypotheses.also
    other = f" As near: {'; '.join(also[:2])}." if also else ""
    other += _untried(measured.log.hypotheses)
    return Finding(
        row.name,
        f"{row.name}: {row.what}. It {'may explain' if measured.columns_alone else 'explains'} "
        f"{row.explained:.3g} of the {row.distance:.3g} nats by which a token differs{in_lines}"
        f"{chosen_among(row)}.{sits}{other}",
        row.remedy,
    )


def none_fits(measured: Measurements) -> Finding | None:
    """A log that no hypothesis explains: rounding, or something that is not in the table."""
    tried = measured.log and measured.log.hypotheses
    if not tried or not tried.tried:
        return None
    if tried.is_rounding:
        if tried.common_dtype:
            return Finding(
                "rounding",
                f"rounding alone, of the audit's dtype: {tried.common_dtype}, and so did the trainer, whose "
                "column agrees with it.",
                "Nothing is broken. Score in the dtype of the log (--dtype), and audit again.",
            )
        cut = measured.log.rounding
        beyond = f", beyond the {cut.decimals} decimals that the log keeps," if cut else ""
        how = "as a log of this size has it" if measured.columns_alone else "as measured on this model"
        return Finding(
            "rounding",
            f"rounding alone. None of {tried.tried} hypotheses fits, and the difference of "
            f"{tried.distance:.2g} nats a token is{beyond} what {tried.rounds_like} rounds, {how}: in size, "
            "in its largest tokens, in its sign, and in each line.",
            "Nothing is broken. Another dtype makes it smaller; importance sampling corrects for it.",
        )
    return _nearest(tried) if tried.rows else None


def _untried(tried: Tried) -> str:
    """That no number at an operation was fitted, where that was wanted, as a further sentence."""
    return f" {tried.untried}" if tried.untried else ""


_ENTERS = (
    "Compare what the two engines compute there, for the same tokens: its weight, its kernel, and what it is "
    "given."
)


def _nearest(tried: Tried) -> Finding:
    """The hypothesis that comes nearest, where none fits, and where the difference enters the model."""
    text = f"none of {tried.tried} hypotheses fits"
    # Too few tokens have no row.
    if tried.rows and (explained := 1 - tried.rows[0].share_left) >= 0.1:
        nearest = tried.rows[0]
        text += f". The nearest is {nearest.name} ({nearest.what}); it would explain {explained:.0%}"
        text += f" of the difference{chosen_among(nearest)}."
    else:
        text += ", and none explains a tenth of the difference."
    text += _sits(tried) + _untried(tried)
    if entry := tried.entry:
        where = entry.text()
        if entry.is_told:
            return Finding("place", f"{where} {begun(text)}", _ENTERS)
        text += f" {begun(where)}"
    if tried.need_a_model:
        remedy = f"Name the model with --model: {tried.need_a_model} further hypotheses need it."
    else:
        remedy = (
            "Audit the log with the checkpoint that drew it (--weight_version, --checkpoints), or let the "
            "engine draw here (--sampler vllm, --sampler hf): then every operation is compared."
        )
    return Finding("unknown", text, remedy)
