"""Which differences of an ablation exceed what the seeds alone make.

A factor is an axis of the grid. Two of its values are compared where all other settings are equal: two groups
of runs that differ in the seed within and in the factor between. The difference exceeds the seeds' spread
when the two ranges, least to most over the seeds, do not overlap. With n seeds each, ranges of equal
distributions are separate in 2 (n!)² / (2n)! of all cases: 1/3 with two seeds, 1/10 with three, 1/35 with
four. Two seeds are therefore too few to tell: with fewer than LEAST_SEEDS nothing is called different.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

# Seeds of either side that a verdict needs.
LEAST_SEEDS = 3
# The figures of a run that are compared, and their names for people.
COMPARED = {
    "reward_last10": "reward of the last 10 steps",
    "held_out_last": "held-out reward",
    "mismatch_k3_mean": "mismatch k3",
}


def effects(combinations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """An entry for each factor, pair of its values, and figure of COMPARED that both have.

    difference: mean over the compared places of (second value - first value). places: how many places there
    are. higher, lower: in how many of them the second value's range lies above or below the first's; 0 with
    fewer than LEAST_SEEDS. least_seeds: of one side of a place.
    """
    entries = []
    for factor in combinations[0]["settings"] if combinations else ():
        places = _places(combinations, factor)
        values = list(dict.fromkeys(c["settings"][factor] for c in combinations))
        for first, second in itertools.combinations(values, 2):
            both = [(p[first], p[second]) for p in places if first in p and second in p]
            for figure in COMPARED:
                sides = [pair for pair in both if all(side[figure]["seeds"] for side in pair)]
                if sides:
                    pairs = [(a[figure], b[figure]) for a, b in sides]
                    entries.append(_effect(factor, first, second, figure, pairs))
    return entries


def _places(combinations: Sequence[Mapping[str, Any]], factor: str) -> list[dict[str, dict[str, Any]]]:
    """For each combination of the other settings: the factor's value -> figure -> spread and seeds."""
    places: dict[str, dict[str, dict[str, Any]]] = {}
    for c in combinations:
        others = json.dumps({k: v for k, v in c["settings"].items() if k != factor})
        places.setdefault(others, {})[c["settings"][factor]] = {
            figure: c[figure] | {"seeds": sum(math.isfinite(run[figure]) for run in c["runs"])}
            for figure in COMPARED
        }
    return list(places.values())


def _effect(
    factor: str,
    first: str,
    second: str,
    figure: str,
    pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]],
) -> dict[str, Any]:
    least_seeds = min(side["seeds"] for pair in pairs for side in pair)
    enough = least_seeds >= LEAST_SEEDS
    return {
        "factor": factor,
        "first": first,
        "second": second,
        "figure": figure,
        "difference": math.fsum(b["mean"] - a["mean"] for a, b in pairs) / len(pairs),
        "places": len(pairs),
        "higher": sum(b["min"] > a["max"] for a, b in pairs) if enough else 0,
        "lower": sum(b["max"] < a["min"] for a, b in pairs) if enough else 0,
        "least_seeds": least_seeds,
    }


def verdict(effect: Mapping[str, Any]) -> str:
    """Whether an effect exceeds the seeds' spread: exceeds, partly, within, or unknown.

    exceeds: in every place, each time the same way. partly: in some places. unknown: with too few seeds.
    """
    if effect["least_seeds"] < LEAST_SEEDS:
        return "unknown"
    if effect["places"] in (effect["higher"], effect["lower"]):
        return "exceeds"
    return "partly" if effect["higher"] or effect["lower"] else "within"


def effect_line(effect: Mapping[str, Any]) -> str:
    """An effect in words."""
    e = effect
    line = (
        f"{e['factor']}: {e['second']} against {e['first']}, {COMPARED[e['figure']]} {e['difference']:+.3g}: "
    )
    kind = verdict(e)
    if kind == "unknown":
        return line + f"{too_few(e['least_seeds'])} to tell"
    chance = f" (one comparison by chance: 1 in {chance_in(e['least_seeds'])})"
    if kind == "exceeds":
        return line + f"exceeds the seeds' spread{_everywhere(e['places'])}{chance}"
    if kind == "partly":
        directions = [f"{n} {way}" for n, way in ((e["higher"], "above"), (e["lower"], "below")) if n]
        where = f"{' and '.join(directions)} of {e['places']} comparisons"
        return line + f"beyond the seeds' spread in {where}{chance}"
    return line + "within the seeds' spread"


def too_few(seeds: int) -> str:
    """That so many seeds are too few, in words."""
    return "1 seed is too few" if seeds == 1 else f"{seeds} seeds are too few"


def chance_in(seeds: int) -> int:
    """Of how many comparisons of equal distributions one has separate ranges, with so many seeds each."""
    return math.comb(2 * seeds, seeds) // 2


def _everywhere(places: int) -> str:
    return f" in all {places} comparisons" if places > 1 else ""


def effect_lines(effects: Sequence[Mapping[str, Any]]) -> list[str]:
    """The effects in words: those that exceed the seeds' spread first."""
    return [effect_line(e) for e in sorted(effects, key=rank)]


def rank(effect: Mapping[str, Any]) -> int:
    """The place of an effect in a list: those that exceed the seeds' spread come first."""
    return ("exceeds", "partly", "within", "unknown").index(verdict(effect))
