"""One section of a part, in a process of its own: python -m zerokl.benchmarks.device.section MODULE NAME."""

import importlib
from collections.abc import Iterator

from zerokl.benchmarks.device.processes import serve
from zerokl.benchmarks.machine import Machine, Row


def _rows(m: Machine, module: str, name: str) -> Iterator[Row]:
    sections = importlib.import_module(module).SECTIONS
    return next(section for section in sections if section.__name__ == name)(m)


if __name__ == "__main__":
    serve(_rows)
