"""`zerokl verify binaries`: every kernel, compiled for every target, checked and compared with the table."""

import json
from pathlib import Path

from rich.table import Table

from ... import kernels
from ...files.reading import read_json
from ...kernels.backend import INTERPRETED
from ...kernels.compiled_cases import configurations
from ...verify.binaries import TARGETS, Binary, as_table, compile_launch, faults, inspect
from ..display.progress import Display
from ..display.terminal import console

# Registers and shared memory of every binary, for each version of Triton: another version allocates other
# numbers. The versions are those that torch for CUDA comes with (torch 2.11: Triton 3.6.0, 2.13: 3.7.1,
# 2.14: 3.8.0), and 3.9.0.
TABLE = Path(kernels.__file__).parent / "binaries.json"


def verify_binaries(targets: tuple[str, ...], write: bool) -> int:
    """Compile the kernels, and print the table and the faults. Returns the exit code: 1 for any fault.

    targets: none means all. write: record the table again. Raises ValueError for an unknown target.
    """
    if write and targets:
        raise ValueError(f"verify binaries: --record needs every target; drop --targets {' '.join(targets)}")
    binaries = build(targets or tuple(TARGETS))
    console.print(_table(binaries))
    if write:
        write_table(binaries)
    faults_found, comparison = check(binaries)
    for fault in faults_found:
        console.print(fault)
    console.print(f"{len(binaries)} binaries, {len(faults_found)} faults; {comparison}")
    return 1 if faults_found else 0


def _table(binaries: list[Binary]) -> Table:
    """A row for each kernel, a column for each target."""
    targets = list(dict.fromkeys(b.target for b in binaries))
    table = Table("registers, shared bytes", *targets)
    cells: dict[str, list[str]] = {}
    for b in binaries:
        cells.setdefault(b.name, []).append(f"{b.registers}, {b.shared_bytes}")
    for name, row in cells.items():
        table.add_row(name, *row)
    return table


def build(targets: tuple[str, ...]) -> list[Binary]:
    """Compile every configuration of kernels/compiled_cases.py for the targets, and read the binaries.

    Raises ValueError for an unknown target, and where Triton is interpreted.
    """
    if INTERPRETED:
        raise ValueError(
            "verify binaries: TRITON_INTERPRET (1) must be unset; interpreted kernels cannot be compiled"
        )
    for target in targets:
        if target not in TARGETS:
            raise ValueError(f"verify binaries: target ({target}) must be one of {', '.join(TARGETS)}")
    binaries = []
    for target in targets:
        launches = list(configurations(target))
        with Display(len(launches), target, transient=True) as display:
            for name, launch in launches:
                binaries.append(inspect(name, target, compile_launch(*launch, target)))
                display.step([name])
    return binaries


def write_table(binaries: list[Binary]) -> None:
    """Record registers and shared memory of these binaries, for the Triton that is installed."""
    import triton

    tables = read_json(TABLE) | {triton.__version__: as_table(binaries)}
    text = []
    for version, table in sorted(tables.items()):
        rows = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(table.items())]
        text.append(f"{json.dumps(version)}: {{\n" + ",\n".join(rows) + "\n}")
    TABLE.write_text("{" + ",\n".join(text) + "}\n")


def check(binaries: list[Binary]) -> tuple[list[str], str]:
    """The faults, and a line that says which version's table the binaries were compared with."""
    import triton

    tables = read_json(TABLE)
    table = tables.get(triton.__version__)
    comparison = f"Triton {triton.__version__}"
    if not table:
        comparison += f", which the table lacks: not compared ({', '.join(tables)})"
    return faults(binaries, table), comparison
