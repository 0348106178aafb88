"""What the hypotheses about a log say, in words."""

from ..finding import Finding
from ..hypotheses.fit import Tried
from ..log_section import TrainerColumn
from ..report import Measurements


def log_notes(measured: Measurements) -> list[str]:
    """Faults that a log's ids show by themselves, and what its own trainer column is."""
    if measured.log is None:
        return []
    texts = [f"In the log, {fault.name}: {fault.text} {fault.remedy}" for fault in measured.log.log_faults]
    return texts + ([_trainer_column(measured.log.trainer_column)] if measured.log.trainer_column else [])


def _trainer_column(tried: TrainerColumn) -> str:
    """What the model and the sampler's column say to the log's own trainer column."""
    distance = f"The log's trainer column differs from the model by {tried.distance:.3g} nats a token"
    beside = tried.distribution.found
    if beside and beside.kind.startswith("trainer"):
        return f"{distance}: {beside.text} {beside.remedy}"
    if tried.is_rounding:
        return "The log's trainer column is the model's, to within rounding."
    if row := tried.found:
        return f"{distance}, and {row.name} fits it: {row.what}. {row.remedy}"
    return f"{distance}, and no hypothesis fits it."


def trainer_column_fault(measured: Measurements) -> Finding | None:
    """A named error of the log's own trainer column, where the log was audited with a model."""
    tried = measured.log and measured.log.trainer_column
    if not tried:
        return None
    beside = tried.distribution.found
    if beside and beside.kind.startswith("trainer"):
        return Finding(beside.kind, _trainer_column(tried), beside.remedy)
    if tried.found and not tried.is_rounding:
        name = f"the log's trainer column, {tried.found.name}"
        return Finding(name, _trainer_column(tried), tried.found.remedy)
    return None


def fitting(measured: Measurements) -> Finding | None:
    """What was tried on a log and explains its numbers."""
    row = measured.log and measured.log.hypotheses.found
    if not row:
        return None
    of_lines = f" in {row.lines} of {row.lines_tried} lines" if row.lines_tried > 1 else ""
    also = measured.log.hypotheses.also
    other = f" As near: {'; '.join(also[:2])}." if also else ""
    return Finding(
        row.name,
        f"{row.name}: {row.what}. It explains {row.explained:.3g} of the "
        f"{row.distance:.3g} nats by which a token differs{of_lines}.{other}",
        row.remedy,
    )


def _rounding_of(measured: Measurements) -> str:
    """The dtype whose rounding a difference is compared with: without a model, that of an fp32 forward."""
    return "an fp32 forward" if measured.columns_alone else measured.dtypes.dtype


def none_fits(measured: Measurements) -> Finding | None:
    """A log that no hypothesis explains: rounding, or something that is not in the table."""
    tried = measured.log and measured.log.hypotheses
    if not tried or not tried.tried:
        return None
    if tried.is_rounding:
        return Finding(
            "rounding",
            f"rounding alone. None of {tried.tried} hypotheses fits, and the difference of "
            f"{tried.distance:.2g} nats a token is of the size that {_rounding_of(measured)} rounds "
            f"({tried.rounding:.2g}).",
            "Nothing is broken. Another dtype makes it smaller; importance sampling corrects for it.",
        )
    return _nearest(tried) if tried.rows else None


def _nearest(tried: Tried) -> Finding:
    """The hypothesis that comes nearest, where none fits."""
    nearest, explained = tried.rows[0], 1 - tried.rows[0].share_left
    text = f"none of {tried.tried} hypotheses fits"
    if explained >= 0.1:
        text += f". The nearest is {nearest.name} ({nearest.what}); it would explain {explained:.0%}"
        text += " of the difference."
    else:
        text += ", and none explains a tenth of the difference."
    if tried.need_a_model:
        remedy = f"Name the model with --model: {tried.need_a_model} further hypotheses need it."
    else:
        remedy = (
            "Audit the log with the checkpoint that drew it (--weight_version, --checkpoints), or let the "
            "engine draw here (--sampler vllm, --sampler hf): then every operation is compared."
        )
    return Finding("unknown", text, remedy)
