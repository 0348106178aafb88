"""`zerokl verify binaries`: every kernel, compiled for every target and checked.

A table holds registers and shared memory of every binary, for each version of Triton: another version
allocates other numbers. It is for those who change kernels: a binary that takes more is a fault. zerokl's own
table is tests/triton/binaries.json. Its versions are those that torch for CUDA comes with (torch 2.11: Triton
3.6.0, 2.13: 3.7.1, 2.14: 3.8.0), and 3.9.0.
"""

import json
import os
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from rich.table import Table

from ....files.inputs import read_bytes
from ....files.writing import write_whole
from ....kernels.backend import INTERPRETED
from ....kernels.compiled_cases import configurations
from ....verify.binaries import TARGETS, Binary, as_table, faults, inspect_all
from ...display.progress import Display
from ...display.terminal import console

# Version of Triton -> name -> target -> registers of a thread, shared bytes.
RecordedTables = dict[str, dict[str, dict[str, tuple[int, int]]]]
_TABLES = TypeAdapter(RecordedTables)


def verify_binaries(targets: tuple[str, ...], table: Path | None, write: bool) -> bool:
    """Compile the kernels, and print their sizes and the faults. Returns whether there is no fault.

    targets: none means all. table: the file to compare with. write: record this Triton's part of it again.
    Raises ValueError for an unknown target, and for a table that cannot be read.
    """
    if write and not table:
        raise ValueError("verify binaries: --record needs the file to record to; add --table FILE")
    if write and targets:
        raise ValueError(f"verify binaries: --record needs every target; drop --targets {' '.join(targets)}")
    recorded = read_tables(table) if table and not (write and not table.exists()) else {}
    binaries = build(targets or tuple(TARGETS))
    console.print(_sizes(binaries))
    if write:
        recorded |= {installed_triton(): as_table(binaries)}
        write_tables(table, recorded)
    faults_found, comparison = check(binaries, recorded)
    for fault in faults_found:
        console.print(fault)
    console.print(f"{len(binaries)} binaries, {len(faults_found)} faults; {comparison}")
    return not faults_found


def _sizes(binaries: list[Binary]) -> Table:
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

    All cores do so at once.

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
            for binary in inspect_all(launches, target, os.cpu_count() or 1):
                binaries.append(binary)
                display.step([binary.name])
    return binaries


def installed_triton() -> str:
    """The version of Triton that compiles here."""
    import triton

    return triton.__version__


def read_tables(file: Path) -> RecordedTables:
    """The tables of a file, by version of Triton. Raises ValueError for a file that holds none."""
    try:
        return _TABLES.validate_json(read_bytes(file))
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"])) or "it"
        raise ValueError(
            f"verify binaries: {file} is no table of registers ({place}: {error.errors()[0]['msg']}); "
            "--record writes one"
        ) from None


def write_tables(file: Path, tables: RecordedTables) -> None:
    """Write what `read_tables` reads, a line for each binary."""
    text = []
    for version, table in sorted(tables.items()):
        rows = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(table.items())]
        text.append(f"{json.dumps(version)}: {{\n" + ",\n".join(rows) + "\n}")
    write_whole(file, ("{" + ",\n".join(text) + "}\n").encode())


def check(binaries: list[Binary], tables: RecordedTables) -> tuple[list[str], str]:
    """The faults, and a line that says which version's table the binaries were compared with."""
    version = installed_triton()
    comparison = f"Triton {version}"
    if tables and version not in tables:
        comparison += f", which the table lacks: not compared ({', '.join(tables)})"
    return faults(binaries, tables.get(version)), comparison
