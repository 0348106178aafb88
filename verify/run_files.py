"""The files in a run's folder that others than the run look for. It loads nothing."""

import re
from pathlib import Path

CONFIG, LEDGER, ROLLOUTS = "config.toml", "ledger.jsonl", "rollouts.jsonl"


def checkpoint_folders(run: Path) -> list[Path]:
    """The checkpoint folders of a run, newest first, found by their names."""
    folders = (p for p in run.glob("checkpoints/step-*") if re.fullmatch("step-[0-9]{1,18}", p.name))
    return sorted(folders, key=lambda p: -int(p.name[5:]))
