"""What a part leaves behind: its table, and a file in the history of its GPU.

A file of benchmarks/results/<gpu>/ is one run of one part: date, commit, versions, rows. Files are never
overwritten, so the folder is the history. The variable RESULTS names another folder than benchmarks/results.
"""

import json
import os
import re
import subprocess
from datetime import date
from itertools import count
from pathlib import Path

import torch
from zerokl.benchmarks.machine import Row
from zerokl.files.writing import first_free
from zerokl.verify.run_environment import environment

RESULTS = Path(os.environ.get("RESULTS") or Path(__file__).resolve().parents[1] / "results")


class Report:
    """The rows of one run of a part. target: its file; None where nothing is measured."""

    def __init__(self, part: str, target: Path | None, about: dict[str, object]):
        self.rows: list[Row] = []
        self.left_out: list[str] = []
        self.target, self._about = target, {"part": part} | about

    def write(self, seconds: float) -> None:
        """Write the rows so far."""
        if self.target is None:
            return
        result = self._about | {"seconds": seconds, "left_out": self.left_out, "rows": self.rows}
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.target.write_text(json.dumps(result, indent=1) + "\n")

    @property
    def unequal(self) -> list[object]:
        """The names of the rows with unequal bits."""
        return [row["what"] for row in self.rows if row.get("unequal")]

    @property
    def failed(self) -> list[object]:
        """What could not run, with its error. It says nothing of bits."""
        return [row["what"] for row in self.rows if row.get("failed")]

    def table(self) -> str:
        """A line for each row."""
        return "\n".join(_line({k: v for k, v in row.items() if k != "section"}) for row in self.rows)


def _line(row: Row) -> str:
    cells = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if k != "what"]
    return f"{row['what']:<72} {'  '.join(cells)}"


def gpu_folder(name: str) -> str:
    """The folder of a GPU: h100 for every "NVIDIA H100 ...", the whole name where it is of no such form."""
    model = re.search(r"\b(?:[ABHL]|GB|GH|MI)\d+\w*\b", name)
    return (model[0] if model else re.sub(r"\W+", "-", name)).lower()


def new_report(part: str, device: torch.device, measures: bool) -> Report:
    """The report of a run on this device.

    Its commit is the variable COMMIT, for files without their history, or else git's answer.
    """
    if not measures:
        return Report(part, None, {})
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    description = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    commit, today = os.environ.get("COMMIT") or description or "unknown", date.today().isoformat()
    folder = RESULTS / gpu_folder(torch.cuda.get_device_name(device))
    names = (f"{today}-{commit[:7]}-{part}{'' if n == 1 else f'-{n}'}.json" for n in count(1))
    about = {"date": today, "commit": commit, "environment": environment(root, device, {})}
    return Report(part, first_free(folder / name for name in names), about)
