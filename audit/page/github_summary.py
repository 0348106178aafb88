"""The summary of an audit in GitHub's Markdown, for $GITHUB_STEP_SUMMARY."""

from ...pages.markdown import escaped, table
from ..conclusion.verdict import verdict
from ..report import Report


def summary(report: Report, band: str | None) -> str:
    """The outcome, the verdict and the figures as Markdown. band: the one that was asked for."""
    corrections, figures = report.corrections, report.shown.figures
    rows = [
        ("tokens", f"{figures.tokens:,}"),
        ("sequences", f"{figures.sequences:,}"),
        ("equal to the bit", f"{figures.frac_equal:.4%}"),
        ("largest difference", f"{figures.max_abs:.4g}"),
        ("k3, nats a token", f"{figures.k3.value:.4g} ± {figures.k3.standard_error:.2g}"),
        *(
            (
                f"sequences outside of {name} ({row.low:g} .. {row.high:g})",
                f"{row.sequences_outside:.2%}",
            )
            for name, row in corrections.bands.items()
        ),
        *(
            (
                f"tokens / sequences above a ratio of {row.bound:g}",
                f"{row.tokens:.2%} / {row.sequences:.2%}",
            )
            for row in corrections.cut
        ),
    ]
    asked = f" (band {band})" if band else ""
    lines = [
        f"### zerokl audit: {'passed' if report.outcome.passed else 'failed'}{asked}",
        "",
        f"**{escaped(report.outcome.words)}**",
        "",
        escaped(verdict(report)),
        "",
        table(("figure", "value"), rows),
    ]
    if report.log_notes:
        lines += ["", *(f"- {escaped(note)}" for note in report.log_notes)]
    return "\n".join(lines) + "\n"
