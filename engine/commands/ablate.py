"""`zerokl ablate GRID.toml --out DIR`: runs over all combinations of settings and seeds, and a report.

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

Every combination with every seed is a run of its own in DIR/cells/COMBINATION/seed-N. Its configuration lies
beside it in seed-N.toml. When the ablation is started again, a run that has ended is kept, and a run that was
interrupted starts anew. A run that ends by itself (after ten overflows in a row, say) is a result as well.
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
        """The run's folder below DIR/cells."""
        return f"{self.name}/seed-{self.config.seed}"


def read_grid(path: str | Path) -> list[Cell]:
    """The cells of a grid file, combination by combination, seed by seed.

    Raises ValueError for a file that cannot be read and for a cell that cannot be run.
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
    """Yields (axis -> label, key -> value) for every combination."""
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


def ablate(grid: str | Path, out: str | Path) -> dict[str, Any]:
    """Run the cells of the grid that have not ended yet. Returns what ablation.json holds.

    Writes ablation.json, ablation.md and plots to `out`. Raises ValueError for a grid that cannot be run, and
    for a folder that holds runs of another grid.
    """
    cells, out = read_grid(grid), Path(out)
    cells = [Cell(c.name, c.settings, _with_model(c.config, out)) for c in cells]
    for cell in cells:
        _refuse_other_configuration(cell, out)
    results = []
    for number, cell in enumerate(cells, 1):
        path = out / "cells" / cell.folder
        kept = _has_ended(path)
        console.print(f"{number}/{len(cells)}  {cell.folder}" + ("  kept" if kept else ""))
        if not kept:
            _run(cell, path)
        results.append(cell_result(path, cell.settings, cell.config.seed))
    report = {"grid": Path(grid).read_text(encoding="utf-8"), "combinations": summarise(results)}
    (out / "ablation.json").write_text(json.dumps(finite(report), indent=1) + "\n")
    write_report(report, out)
    return report


def _with_model(config: Config, out: Path) -> Config:
    """The configuration with the folder of its base model.

    Cells that ask for the same init:PRESET share a folder.
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


def _has_ended(path: Path) -> bool:
    return (path / "summary.json").exists() or (path / FAILED).exists()


def _refuse_other_configuration(cell: Cell, out: Path) -> None:
    """Raise ValueError where the cell's folder holds an ended run with another configuration."""
    path = out / "cells" / cell.folder
    if (
        _has_ended(path)
        and (path / "config.toml").exists()
        and (path / "config.toml").read_text() != to_toml(with_device(cell.config))
    ):
        raise ValueError(f"ablate: {path} holds a run of another configuration; choose another --out")


def _run(cell: Cell, path: Path) -> None:
    """Do the run in a process of its own.

    In this process, what an engine leaves behind (vLLM keeps threads and memory) would slow the runs after
    it. Raises ValueError when the run refuses its settings. Raises ChildProcessError when its process ends in
    another way.
    """
    if path.exists():
        console.print(f"{path} was interrupted: it starts anew")
        shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    config = path.parent / f"{path.name}.toml"
    config.write_text(to_toml(cell.config), encoding="utf-8")
    read_fd, write_fd = os.pipe()
    process = start_python(
        "from zerokl.engine.commands.ablate import run_alone; run_alone()",
        str(config),
        str(path),
        str(write_fd),
        fds=[write_fd],
    )
    os.close(write_fd)
    try:
        with open(read_fd, encoding="utf-8") as pipe:
            refusal = pipe.read()
        code = process.wait()
    finally:
        process.terminate()  # no run goes on without the ablation
        process.wait()
    if refusal:
        raise ValueError(refusal)
    if code:
        raise ChildProcessError(
            f"ablate: the process of {cell.folder} {ending(code)}; "
            "start the ablation again, and it continues there"
        )
    if (path / FAILED).exists():
        console.print(f"{cell.folder} ended by itself: {json.loads((path / FAILED).read_text())['error']}")


def run_alone() -> None:
    """The main function of a run's process.

    Arguments of the process: the configuration file, the run folder, and a file descriptor that takes the
    reason of a refusal.
    """
    config, path, refusal_fd = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    # The pipe must end with this process, not with a process that this one starts.
    os.set_inheritable(refusal_fd, False)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        train(load_config(config, None, {}), path)
    except (MismatchError, FloatingPointError) as error:
        path.mkdir(parents=True, exist_ok=True)
        (path / FAILED).write_text(json.dumps({"error": " ".join(str(error).split())}) + "\n")
    except ChildProcessError:
        raise  # not a refusal: one of the run's own processes was killed
    except (ValueError, OSError) as error:
        os.write(refusal_fd, str(error).encode())
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _end_with(parent: int) -> None:
    """End this process when the ablation was killed.

    Otherwise an ablation that is started again would begin the same run beside this process.
    """
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
