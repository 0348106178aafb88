"""`zerokl ablate GRID.toml --out DIR`: runs over all combinations of settings and seeds, and a report.

ablation_grid.py shows a grid file. Every combination with every seed is a run of its own in
DIR/cells/COMBINATION/seed-N. Its configuration lies beside it in seed-N.toml, and what it prints in
seed-N.log. When the ablation is started again, a run that has ended is kept, and a run that was interrupted
goes on from its newest checkpoint. A run that ends by itself (after ten overflows in a row, say) is a result
as well. A run that was refused or killed is none: it is named with its reason, and done again next time.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....files.inputs import read_text
from ....files.writing import check_writable, hold_folder, write_whole
from ...config.config_file import load_config, to_toml
from ...config.run_config import Config
from ...tasks.perfectible import perfectible_set
from ..base_model import is_base, make_base
from ..folder import finite
from ..setup import settled
from .cells import CellRun, State, run_cells
from .display import GridDisplay
from .effects import effects
from .figures import cell_result, summarise
from .grid import ABLATION, CELLS, Cell, read_grid
from .hypotheses import Hypothesis, judged, read_hypotheses
from .result_table import write_table


def ablate(grid: str | Path, out: str | Path, jobs: int = 1) -> dict[str, Any]:
    """Run the cells of the grid that have not ended yet, `jobs` at a time. Returns what ablation.json holds.

    Writes ablation.json and ablation.md to `out`; `failures` in the first names the cells without a result.
    Raises ValueError for a grid that cannot be run, and for a folder that holds runs of another grid.
    """
    cells, text, out = read_grid(grid), read_text(grid), Path(out)
    hypotheses = read_hypotheses(Path(grid), cells)
    if jobs < 1:
        raise ValueError(f"ablate: jobs ({jobs}) must be at least 1")
    check_writable(out)
    with hold_folder(out):
        runs = [CellRun(cell, out / "cells" / cell.folder) for cell in _with_models(cells, out)]
        for run in runs:
            _refuse_other_configuration(run)
        write_whole(out / CELLS, (json.dumps(_planned(cells), indent=1) + "\n").encode())
        run_cells(runs, jobs, GridDisplay(runs))
        report = _report(text, runs, hypotheses)
        write_whole(out / ABLATION, (json.dumps(finite(report), indent=1) + "\n").encode())
        if report["combinations"]:
            write_table(report, out)
    return report


def _planned(cells: Sequence[Cell]) -> dict[str, Any]:
    """What cells.json holds: the folder of each cell below DIR/cells, and the settings of its combination."""
    return {"cells": [{"folder": cell.folder, "settings": cell.settings} for cell in cells]}


def _report(grid: str, runs: Sequence[CellRun], hypotheses: Sequence[Hypothesis]) -> dict[str, Any]:
    """What ablation.json holds: the grid file's text, a summary of each combination, and what differs."""
    results = [
        cell_result(run.path, run.cell.settings, run.cell.config.seed)
        for run in runs
        if run.state is not State.FAILED
    ]
    combinations = summarise(results)
    return {
        "grid": grid,
        "combinations": combinations,
        "effects": effects(combinations),
        "hypotheses": judged(hypotheses, combinations),
        "failures": {run.cell.folder: run.reason for run in runs if run.state is State.FAILED},
    }


def _with_models(cells: Sequence[Cell], out: Path) -> list[Cell]:
    return [Cell(c.name, c.settings, _with_model(c.config, out)) for c in cells]


def _with_model(config: Config, out: Path) -> Config:
    """The configuration with the folder of its base model.

    Cells that ask for the same init:PRESET share a folder.
    """
    if not config.model.startswith("init:"):
        return config
    preset, seed = config.model.removeprefix("init:"), config.init.seed_of(config.seed)
    for number in itertools.count():
        base = out / "models" / f"{preset}-seed-{seed}{f'-{number}' if number else ''}"
        if not perfectible_set(base):
            make_base(base, config)
        if is_base(base, config):
            return config.model_copy(update={"model": str(base)})
    raise AssertionError("some number is free")


def _refuse_other_configuration(run: CellRun) -> None:
    """Raise ValueError where the cell's folder holds a run with another configuration."""
    file = run.path / "config.toml"
    if not file.exists():
        return
    was, now = load_config(str(file)), settled(run.cell.config)
    started_elsewhere = now.model_copy(
        update={"task": now.task.model_copy(update={"directory": was.task.directory})}
    )
    if to_toml(was) != to_toml(started_elsewhere):
        raise ValueError(f"ablate: {run.path} holds a run of another configuration; choose another --out")
