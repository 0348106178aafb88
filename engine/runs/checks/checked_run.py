"""What the checks of `zerokl verify run` share: the files of a run, as far as each was found intact."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....verify.difference import Difference
from ....verify.ledger import LedgerFile
from ...config.run_config import Config
from ..intact_checkpoints import Checkpoint
from .logged_steps import LoggedStep


@dataclass(frozen=True)
class CheckedRun:
    """A run. Each check adds those files that it finds intact."""

    path: Path
    config: Config
    ledger: LedgerFile
    checkpoints: list[Checkpoint] = field(default_factory=list)  # intact, newest first
    metrics: dict[int, dict[str, Any]] = field(default_factory=dict)  # by step
    rollouts: dict[int, LoggedStep] = field(default_factory=dict)  # by step

    @property
    def ended(self) -> bool:
        """Whether the run has a summary, which it writes at its end."""
        return (self.path / "summary.json").exists()


def fault_in(check: Callable[[], Difference | str | None]) -> Difference | str | None:
    """What a check finds, or why it could not read what it checks."""
    try:
        return check()
    except (OSError, ValueError) as error:
        return str(error) or type(error).__name__  # an empty reason is no pass
