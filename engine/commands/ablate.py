"""`zerokl ablate GRID.toml --out DIR`: a grid of runs over any keys of the configuration and seeds, and what
came out of it.

    preset = "demo"                     # or file = "base.toml"; what all cells have in common
    seeds = [0, 1, 2]
    [set]                               # keys that differ from it in every cell
    steps = 60
    [grid]                              # an axis for each key: the values it takes
    dtype = ["float32", "float16"]
    "loss.preset" = ["pg", "grpo"]
    [variants.mismatch]                 # an axis of settings of several keys, each under a name
    none = {}
    amplified = { exact = false, "perturb.round_weights" = "bfloat16", "perturb.gain" = 8.0 }

Every combination, with every seed, is a run of its own in DIR/cells/COMBINATION/seed-N, its configuration
beside it in seed-N.toml. A run that has ended is kept when the ablation is started again, one that was
interrupted starts anew. A run that ends by itself (ten overflows in a row, say) is a result as well.
"""

import itertools
import json
import os
import shutil
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Config
from ..config_file import load_config, to_toml
from ..parallel.workers import ending, start_python
from ..runs.base_model import is_base, make_base
from ..runs.folder import finite
from ..runs.run import train
from ..runs.setup import with_device
from ..runs.terminal import console
from ..tasks.perfectible import perfectible_set
from ..train.monitor import MismatchError
from .ablation_report import FAILED, cell_result, summarise, write_report


@dataclass(frozen=True)
class Cell:
    """One run of the grid: its combination's name and settings (axis -> label), and its configuration."""

    name: str
    settings: dict[str, str]
    config: Config

    @property
    def folder(self) -> str:
        """Below DIR/cells."""
        return f"{self.name}/seed-{self.config.seed}"


def read_grid(path: str | Path) -> list[Cell]:
    """The cells of a grid file, combination by combination, seed by seed.

    Raises ValueError for whatever cannot be read or run.
    """
    try:
        grid = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"ablate: {path} cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"ablate: {path} is not valid TOML ({error})") from None
    unknown = [k for k in grid if k not in ("preset", "file", "seeds", "set", "grid", "variants")]
    if unknown:
        raise ValueError(
            f"ablate: {path}: unknown key {unknown[0]}; keys are preset, file, seeds, set, grid, variants"
        )
    seeds = grid.get("seeds", [0])
    if not isinstance(seeds, list) or not seeds or len(set(map(str, seeds))) < len(seeds):
        raise ValueError(f"ablate: {path}: seeds ({seeds!r}) must be a list of different numbers")
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


def _combinations(grid: Mapping[str, Any], path: str) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """(axis -> label, key -> value) of every combination."""
    axes: list[list[tuple[str, str, dict[str, Any]]]] = []
    for key, values in _flat(grid.get("grid", {})).items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"ablate: {path}: grid.{key} ({values!r}) must be a list of values")
        axes.append([(key, _label(v), {key: v}) for v in values])
    for axis, variants in grid.get("variants", {}).items():
        if not isinstance(variants, Mapping) or not all(isinstance(v, Mapping) for v in variants.values()):
            raise ValueError(f"ablate: {path}: variants.{axis} must hold a table of keys for each name")
        axes.append([(axis, label, _flat(keys)) for label, keys in variants.items()])
    for combination in itertools.product(*axes):
        yield (
            {axis: label for axis, label, _ in combination},
            {k: v for _, _, keys in combination for k, v in keys.items()},
        )


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    found = {}
    for key, value in table.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def _label(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _name(settings: Mapping[str, str]) -> str:
    """A folder's name for a combination."""
    return (
        ",".join(f"{axis.rsplit('.', 1)[-1]}={label}" for axis, label in settings.items()).replace("/", "_")
        or "run"
    )


def ablate(grid: str | Path, out: str | Path) -> dict[str, Any]:
    """Run what the grid asks for and is not there yet; writes ablation.json, ablation.md and plots to `out`.
    Returns the former.

    Raises ValueError for a grid that cannot be run, or for a folder that holds runs of another one.
    """
    cells, out = read_grid(grid), Path(out)
    cells = [Cell(c.name, c.settings, _with_model(c.config, out)) for c in cells]
    for cell in cells:
        _refuse_another(cell, out)
    results = []
    for number, cell in enumerate(cells, 1):
        path = out / "cells" / cell.folder
        kept = _ended(path)
        console.print(f"{number}/{len(cells)}  {cell.folder}" + ("  kept" if kept else ""))
        if not kept:
            _run(cell, path)
        results.append(cell_result(path, cell.settings, cell.config.seed))
    report = {"grid": Path(grid).read_text(encoding="utf-8"), "combinations": summarise(results)}
    (out / "ablation.json").write_text(json.dumps(finite(report), indent=1) + "\n")
    write_report(report, out)
    return report


def _with_model(config: Config, out: Path) -> Config:
    """The configuration with the folder of its base model:

    cells that ask for the same init:PRESET share it.
    """
    if not config.model.startswith("init:"):
        return config
    preset = config.model.removeprefix("init:")
    for number in itertools.count():
        base = out / "models" / f"{preset}-seed-{config.seed}{f'-{number}' if number else ''}"
        if not perfectible_set(base):
            make_base(base, config)
        if is_base(base, config):
            return config.model_copy(update={"model": str(base)})
    raise AssertionError("some number is free")


def _ended(path: Path) -> bool:
    return (path / "summary.json").exists() or (path / FAILED).exists()


def _refuse_another(cell: Cell, out: Path) -> None:
    """Raise ValueError where the cell's folder holds the end of a run with another configuration."""
    path = out / "cells" / cell.folder
    if (
        _ended(path)
        and (path / "config.toml").exists()
        and (path / "config.toml").read_text() != to_toml(with_device(cell.config))
    ):
        raise ValueError(f"ablate: {path} holds a run of another configuration; choose another --out")


def _run(cell: Cell, path: Path) -> None:
    """The run, in a process of its own: what an engine leaves behind (vLLM keeps threads and memory) would
    slow the runs after it.

    Raises ValueError for what the run refuses, ChildProcessError when its process ended otherwise.
    """
    if path.exists():
        console.print(f"{path} was interrupted: it starts anew")
        shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    config = path.parent / f"{path.name}.toml"
    config.write_text(to_toml(cell.config), encoding="utf-8")
    read, write = os.pipe()
    process = start_python(
        "from zerokl.engine.commands.ablate import run_alone; run_alone()",
        str(config),
        str(path),
        str(write),
        fds=[write],
    )
    os.close(write)
    try:
        with open(read, encoding="utf-8") as pipe:
            refused = pipe.read()
        code = process.wait()
    finally:
        process.terminate()  # nothing goes on without the ablation
        process.wait()
    if refused:
        raise ValueError(refused)
    if code:
        raise ChildProcessError(
            f"ablate: the process of {cell.folder} {ending(code)}; start the ablation again, and it goes on there"
        )
    if (path / FAILED).exists():
        console.print(f"{cell.folder} ended by itself: {json.loads((path / FAILED).read_text())['error']}")


def run_alone() -> None:
    """The life of a run's process.

    Arguments: configuration file, run folder, a descriptor that takes the reason of a refusal.
    """
    config, path, refused = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    os.set_inheritable(refused, False)  # it ends with this process, not with one that this one starts
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        train(load_config(config, None, {}), path)
    except (MismatchError, FloatingPointError) as error:
        path.mkdir(parents=True, exist_ok=True)
        (path / FAILED).write_text(json.dumps({"error": " ".join(str(error).split())}) + "\n")
    except ChildProcessError:
        raise  # not a refusal: one of the run's own processes was killed
    except (ValueError, OSError) as error:
        os.write(refused, str(error).encode())
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _end_with(parent: int) -> None:
    """End this process when the ablation has been killed:

    started again, it would begin the same run beside this one.
    """
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
