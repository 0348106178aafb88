"""A replay as lines for the terminal, as GitHub's Markdown, and as cases of JUnit."""

from dataclasses import asdict

from ...pages.markdown import escaped, table
from ..figures.bands import band_lines
from ..junit import Case
from .asked_again import Replay
from .column_pairs import Pair

# Changed settings that the terminal and the summary list at most.
_LISTED = 40


def lines(replay: Replay) -> list[str]:
    """What a replay says, a sentence a line; the outcome is not among them."""
    sentences = [f"model: {line}" for line in replay.model]
    sentences += [f"changed: {c.setting}: {c.before} -> {c.now}" for c in replay.changes[:_LISTED]]
    if len(replay.changes) > _LISTED:
        sentences.append(f"changed: {len(replay.changes) - _LISTED} more settings")
    sentences += [*replay.drawn, *(pair_line(pair) for pair in replay.pairs)]
    if replay.tolerances.band:
        for pair in replay.pairs:
            sentences += [
                f"{pair.name}: {line}" for line in band_lines(pair.corrections, replay.tolerances.band)[:1]
            ]
    if not replay.pairs:
        sentences.append("the capsule has no trainer column, so nothing was compared")
    return sentences


def pair_line(pair: Pair) -> str:
    """One comparison in words."""
    figures = pair.figures
    if figures.equal:
        return f"{pair.name}: equal to the bit ({figures.tokens:,} tokens)"
    return (
        f"{pair.name}: {figures.frac_equal:.2%} of {figures.tokens:,} tokens are equal to the bit; "
        f"the largest difference is {figures.max_abs:.4g} and k3 {figures.k3.value:.4g}; "
        f"bits part first at {pair.first}"
    )


def markdown(replay: Replay) -> str:
    """The summary for GitHub."""
    compared = ("compared", "tokens", "equal to the bit", "largest difference", "k3", "bits part first at")
    text = [
        f"### zerokl capsule: {'passed' if replay.passed else 'failed'}",
        "",
        f"**{escaped(replay.words)}** ({escaped(replay.capsule)})",
        "",
        table(compared, map(_row, replay.pairs)),
    ]
    if replay.changes:
        rows = [map(escaped, asdict(change).values()) for change in replay.changes[:_LISTED]]
        text += ["", table(("setting", "then", "now"), rows)]
    notes = [*replay.model, *replay.drawn]
    text += ["", *(f"- {escaped(note)}" for note in notes)] if notes else []
    return "\n".join(text) + "\n"


def _row(pair: Pair) -> list[str]:
    figures = pair.figures
    return [
        pair.name,
        f"{figures.tokens:,}",
        f"{figures.frac_equal:.4%}",
        f"{figures.max_abs:.4g}",
        f"{figures.k3.value:.4g}",
        escaped(str(pair.first or "-")),
    ]


def cases(replay: Replay) -> list[Case]:
    """The cases: each comparison, and that the same tokens were drawn."""
    judged_cases = []
    for pair in replay.pairs:
        judged = pair.gate or replay.tolerances.given
        failed = judged and not pair.holds(replay.tolerances)
        judged_cases.append(Case(pair.name, pair_line(pair) if failed else ""))
    if replay.drawn:
        judged_cases.append(Case("the same tokens", "; ".join(replay.drawn)))
    return judged_cases or [Case("the capsule is whole")]
