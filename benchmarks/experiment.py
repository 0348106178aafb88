"""The result of an ablation, small enough to be committed: docs/sanity-test.md draws its tables from it.

    python benchmarks/experiment.py OUT RESULT.json

OUT is the folder of `zerokl ablate --out OUT`. The result has the grid file, the figures of each combination
and of each run, what became of the hypotheses, versions and machine, and the date.
"""

import datetime
import json
import sys
from pathlib import Path

import torch
from zerokl.benchmarks.engine_pairs import machine


def result(out: Path) -> dict:
    """The report of an ablation without its series, and where it was made."""
    report = json.loads((out / "ablation.json").read_text())
    for combination in report["combinations"]:
        del combination["by_step"]
        for run in combination["runs"]:
            del run["run"]
    return report | made_with()


def made_with() -> dict[str, str]:
    """The machine, torch, and the date."""
    made = {"cpu": machine(), "torch": torch.__version__, "date": datetime.date.today().isoformat()}
    if torch.cuda.is_available():
        made["gpu"] = torch.cuda.get_device_name()
    return made


def main() -> None:
    out, file = map(Path, sys.argv[1:])
    file.write_text(json.dumps(result(out), indent=1) + "\n")


if __name__ == "__main__":
    main()
