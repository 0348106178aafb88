"""The faults that an audit names beside a difference: they are there whatever its size."""

from ..figures.drawn_from import drawn_elsewhere, ratio_words
from ..figures.measure import Figures
from ..finding import Finding
from ..report import Measurements
from .log_findings import trainer_column_fault


def faults(measured: Measurements) -> list[Finding]:
    """Every fault as a cause."""
    findings = (
        _not_batch_invariant(measured),
        _not_drawn_from_the_columns(measured),
        *_in_the_log(measured),
        trainer_column_fault(measured),
    )
    return [finding for finding in findings if finding]


def not_drawn_from(figures: Figures) -> bool:
    """Whether k1 and the mean ratio show that the tokens were not drawn from the sampler's column."""
    return drawn_elsewhere(figures.mean_ratio, figures.k1.value, figures.k1.standard_error)


def _not_batch_invariant(measured: Measurements) -> Finding | None:
    """A sampler whose bits depend on the requests beside a request."""
    if measured.batch_invariance is None or not measured.batch_invariance.unequal_from:
        return None
    return Finding(
        "batch invariance",
        f"{measured.sampler} is not batch-invariant: its bits depend on the requests beside a request.",
        "Let the sampler use kernels whose sums have a fixed order (vLLM: VLLM_BATCH_INVARIANT=1), and audit "
        "it again with --batch_invariance.",
    )


def _not_drawn_from_the_columns(measured: Measurements) -> Finding | None:
    """Tokens that were not drawn from a column: by the checks of a log, or by k1 and the mean ratio."""
    if measured.log:
        # Of two columns alone, one whose numbers are known to be wrong is no witness against the other.
        wrong = measured.log.hypotheses.is_exact or trainer_column_fault(measured)
        witness = not (measured.columns_alone and wrong)
        return measured.log.distribution.fault if witness else None
    if not not_drawn_from(measured.figures):
        return None
    return Finding(
        "distribution",
        "the sampler reported log-probabilities of another distribution than the one it drew from; "
        f"{ratio_words(measured.figures.mean_ratio)}, where sound engines have 1.",
        "Look at the sampler's kind of log-probability, temperature, top-p and top-k.",
    )


def _in_the_log(measured: Measurements) -> list[Finding]:
    """Faults that the ids of a log show by themselves."""
    in_ids = measured.log.log_faults if measured.log else []
    return [Finding(fault.name, f"{fault.name}: {fault.text}", fault.remedy) for fault in in_ids]
