"""The faults that an audit names beside a difference: they are there whatever its size."""

from collections.abc import Mapping
from typing import Any

from ..figures.drawn_from import drawn_elsewhere, ratio_words
from .log_findings import finding, trainer_column_fault

Report = Mapping[str, Any]


def columns_alone(report: Report) -> bool:
    """Whether both columns are the log's, and no model was at hand."""
    return report.get("dtype") == "logged"


def faults(report: Report) -> list[dict[str, str]]:
    """Every fault as a cause: its kind, the cause in words, and what to do about it."""
    findings = (
        _not_batch_invariant(report),
        _not_drawn_from_the_columns(report),
        *_in_the_log(report),
        trainer_column_fault(report),
    )
    return [found for found in findings if found]


def not_drawn_from(report: Report) -> bool:
    """Whether k1 and the mean ratio show that the tokens were not drawn from the sampler's column."""
    k1 = report["k1"]
    return drawn_elsewhere(report["mean_ratio"], k1["value"], k1["standard_error"])


def _not_batch_invariant(report: Report) -> dict[str, str] | None:
    """A sampler whose bits depend on the requests beside a request."""
    if not report.get("batch_invariance", {}).get("unequal_from"):
        return None
    return finding(
        "batch invariance",
        f"{report['sampler']} is not batch-invariant: its bits depend on the requests beside a request.",
        "Let the sampler use kernels whose sums have a fixed order (vLLM: VLLM_BATCH_INVARIANT=1), and audit "
        "it again with --own.",
    )


def _not_drawn_from_the_columns(report: Report) -> dict[str, str] | None:
    """Tokens that were not drawn from a column: by the checks of a log, or by k1 and the mean ratio."""
    if "distribution" in report:
        return report["distribution"]["found"]
    if not not_drawn_from(report):
        return None
    return finding(
        "distribution",
        "the sampler reported log-probabilities of another distribution than the one it drew from; "
        f"{ratio_words(report['mean_ratio'])}, where sound engines have 1.",
        "Look at the sampler's kind of log-probability, temperature, top-p and top-k.",
    )


def _in_the_log(report: Report) -> list[dict[str, str]]:
    """Faults that the ids of a log show by themselves."""
    return [
        finding(x["name"], f"{x['name']}: {x['text']}", x["remedy"]) for x in report.get("log_findings", [])
    ]
