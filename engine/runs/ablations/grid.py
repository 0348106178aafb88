"""The grid file of an ablation, and its cells: a run for each combination of settings with each seed.

    preset = "demo"                     # or file = "base.toml": the configuration that all cells begin with
    seeds = [0, 1, 2]
    [set]                               # keys that every cell sets
    steps = 60
    [grid]                              # an axis for each key: the values that the key takes
    dtype = ["float32", "float16"]
    "loss.preset" = ["pg", "grpo"]
    [variants.mismatch]                 # an axis of named variants, each with settings of several keys
    none = {}
    amplified = { exact = false, "perturb.round_weights" = "bfloat16", "perturb.gain" = 8.0 }
    [[hypotheses]]                      # what is expected, written down before the runs: hypotheses.py

Cells are ordered combination by combination, seed by seed.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....files.reading import read_toml, shown
from ...config.config_file import load_config
from ...config.run_config import Config

# The keys of a grid file, each with its type and the type's name.
_KEYS: dict[str, tuple[type, str]] = {
    "preset": (str, "the name of a preset"),
    "file": (str, "the name of a file"),
    "seeds": (list, "a list of numbers"),
    "set": (dict, "a table of keys"),
    "grid": (dict, "a table of keys with lists of values"),
    "variants": (dict, "a table of axes"),
    "hypotheses": (list, "a list of tables"),
}
# More runs than anybody means: a mistake in an axis.
_MOST_CELLS = 10_000


# Files of an ablation's folder: the figures of its finished cells, and all cells that are planned, for those
# who look on while it goes on.
ABLATION, CELLS = "ablation.json", "cells.json"


@dataclass(frozen=True)
class Cell:
    """One run of the grid: its combination's name and settings (axis -> label), and its configuration."""

    name: str
    settings: dict[str, str]
    config: Config

    @property
    def folder(self) -> str:
        """The run's folder below DIR/cells."""
        return f"{self.name}/seed-{self.config.seed}"


def read_grid(path: str | Path) -> list[Cell]:
    """The cells of a grid file, combination by combination, seed by seed.

    Raises ValueError for a file that cannot be read and for a cell that cannot be run.
    """
    try:
        grid = read_toml(Path(path))
    except OSError as error:
        raise ValueError(f"ablate: {path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"ablate: {path} {error}") from None
    if not grid:
        raise ValueError(f"ablate: {path} is empty; it must have one of the keys {', '.join(_KEYS)}")
    for key, value in grid.items():
        if key not in _KEYS:
            raise ValueError(f"ablate: {path}: unknown key {key[:100]}; keys are {', '.join(_KEYS)}")
        kind, name = _KEYS[key]
        if not isinstance(value, kind):
            raise ValueError(f"ablate: {path}: {key} ({shown(value)}) must be {name}")
    seeds = grid.get("seeds", [0])
    if not seeds or len(set(map(str, seeds))) < len(seeds) or not all(type(s) is int for s in seeds):
        raise ValueError(
            f"ablate: {path}: seeds ({shown(seeds)}) must be a list of different numbers, all whole"
        )
    _refuse_too_many(grid, len(seeds), str(path))
    cells = []
    for settings, keys in _combinations(grid, str(path)):
        for seed in seeds:
            values = _flat(grid.get("set", {})) | keys | {"seed": seed}
            try:
                config = load_config(grid.get("file"), grid.get("preset"), values)
            except ValueError as error:
                raise ValueError(f"ablate: {path}: combination {_name(settings)}: {error}") from None
            cells.append(Cell(_name(settings), settings, config))
    if len({cell.folder for cell in cells}) < len(cells):
        raise ValueError(f"ablate: {path}: an axis has one value twice")
    return cells


def _refuse_too_many(grid: Mapping[str, Any], seeds: int, path: str) -> None:
    axes = [*_flat(grid.get("grid", {})).values(), *grid.get("variants", {}).values()]
    cells = seeds * math.prod(len(axis) for axis in axes if isinstance(axis, list | Mapping))
    if cells > _MOST_CELLS:
        raise ValueError(f"ablate: {path}: has {cells:,} runs; at most {_MOST_CELLS:,} are done at a time")


def _combinations(grid: Mapping[str, Any], path: str) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """Yields (axis -> label, key -> value) for every combination."""
    axes: list[list[tuple[str, str, dict[str, Any]]]] = []
    for key, values in _flat(grid.get("grid", {})).items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"ablate: {path}: grid.{key} ({shown(values)}) must be a list of values")
        axes.append([(key, _label(v), {key: v}) for v in values])
    for axis, variants in grid.get("variants", {}).items():
        if (
            not isinstance(variants, Mapping)
            or not variants
            or not all(isinstance(v, Mapping) for v in variants.values())
        ):
            raise ValueError(f"ablate: {path}: variants.{axis} must hold a table of keys for each name")
        axes.append([(axis, label, _flat(keys)) for label, keys in variants.items()])
    for combination in itertools.product(*axes):
        yield (
            {axis: label for axis, label, _ in combination},
            {k: v for _, _, keys in combination for k, v in keys.items()},
        )


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    flat = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def _label(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _name(settings: Mapping[str, str]) -> str:
    """The name of a combination's folder."""
    return (
        ",".join(f"{axis.rsplit('.', 1)[-1]}={label}" for axis, label in settings.items()).replace("/", "_")
        or "run"
    )
