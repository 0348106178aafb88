"""Seeds: completions that two runs share, though they were given other seeds."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from ...files.inputs import read_text
from .metric_rows import number
from .side import Digest, Side

# `seed = 3`, `"seed": 3,` and `seed: 3`, in TOML, JSON and YAML alike.
_SEED = re.compile(r'^\s*"?(?P<name>[\w.]*seed)"?\s*[:=]\s*(?P<value>-?\d+)\s*,?\s*(#.*)?$', re.M)
_CONFIGURATIONS = (".toml", ".json", ".yaml", ".yml")
_MOST_BYTES = 1 << 20


def seed_of(side: Side) -> tuple[str, int] | None:
    """The seed of a run and where it was found: a column of its metrics, or a configuration in its folder."""
    for row in side.metrics.values():
        if (value := number(row.get("seed"))) is not None:
            return "seed in the metrics", int(value)
    folder = side.path if side.path.is_dir() else side.path.parent
    for file in sorted(f for f in folder.glob("*") if f.suffix in _CONFIGURATIONS and f.is_file()):
        if file.stat().st_size < _MOST_BYTES and (seed := _seed_in(file)):
            return seed
    return None


def _seed_in(file: Path) -> tuple[str, int] | None:
    try:
        seeds = {m["name"]: int(m["value"]) for m in _SEED.finditer(read_text(file))}
    except (OSError, ValueError):
        return None  # a file that is no text says nothing
    name = "seed" if "seed" in seeds else next(iter(seeds), None)
    return None if name is None else (f"{name} in {file}", seeds[name])


def other_seeds(a: Side, b: Side) -> str:
    """How the seeds of two runs differ, in words; empty where they are equal or not known."""
    x, y = seed_of(a), seed_of(b)
    if x is None or y is None or x[1] == y[1]:
        return ""
    return f"A has {x[0]} = {x[1]}, B {y[1]}"


def shared(a: Side, b: Side) -> tuple[int, int, float]:
    """Completions of B that A has too, for the same prompt at the same step; of how many; and by chance.

    By chance: how many are expected where both draw on their own, by the sampler's logprobs of B; NaN where
    it has none. A completion that A drew n times counts n times.
    """
    common = both = 0
    chance = 0.0
    for step in a.steps.keys() & b.steps.keys():
        drawn: dict[bytes, list[bytes | None]] = defaultdict(list)
        for digest in a.steps[step].rollouts:
            if digest.prompt is not None:
                drawn[digest.prompt].append(digest.completion)
        for digest in b.steps[step].rollouts:
            if digest.prompt in drawn and digest.completion is not None:
                common += 1
                both += digest.completion in drawn[digest.prompt]
                chance += _chance(digest, len(drawn[digest.prompt]))
    return both, common, chance


def _chance(digest: Digest, tries: int) -> float:
    """The probability that one of `tries` draws is this completion."""
    if digest.surprise is None:
        return math.nan
    return min(1.0, tries * math.exp(-digest.surprise))


def conclude_seeds(a: Side, b: Side, equal: bool) -> Iterator[str]:
    """What completions that both runs have tell of the seed. equal: whether the logs have no difference."""
    if not (words := other_seeds(a, b)):
        return
    both, common, chance = shared(a, b)
    if equal and common:
        certain = not math.isnan(chance) and chance > 0.99 * common
        if certain:
            yield f"{words}, and all is equal; nothing was drawn, as each completion had probability 1."
        else:
            yield f"{words}, and all {common} completions are equal: the seed is not used."
    elif both and (math.isnan(chance) or both > 10 + 3 * chance):
        by_chance = "" if math.isnan(chance) else f", where {chance:.2g} are expected by chance"
        yield (
            f"{words}, and {both} of {common} completions of the same prompt and step are the same tokens"
            f"{by_chance}: both runs draw from one stream of random numbers."
        )
