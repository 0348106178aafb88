"""`zerokl replay`: steps of a run are done again and compared with its ledger."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....verify.compare_runs import compare_heads, compare_lines, open_run
from ....verify.difference import Difference
from ....verify.ledger import LedgerFile, Line
from ....verify.run_files import checkpoint_folders
from ...config.run_config import ParallelConfig, PoolConfig
from ...rollout.players import Judge
from ...tasks.loading import load_task
from ...train.ledger_recorder import Recorder
from ...train.parallel.workers import use_threads
from ...train.state import StepRecord, TrainState
from ...train.step import train_step
from ..base_model import base_model
from ..intact_checkpoints import usable_checkpoint
from ..ledger_head import run_head
from ..resume import run_config
from ..setup import make_state, run_equivalence, run_judge
from ..trainer_state import Checkpoint, restore, rewind
from .recorded import RecordedEnvironments, can_be_recorded
from .step_trace import check_trace, trace_step


@dataclass(frozen=True)
class Replay:
    """Steps `first` to `last`, done again.

    `difference` is the first difference from the ledger. The replay ends there.
    """

    first: int
    last: int
    difference: Difference | None


class Replayer:
    """A run whose steps can be done again. Use it as a context: it holds worker processes.

    overrides: settings that decide no bit. checkpoints: the checkpoints that can be used, newest first, where
    they have been checked already; None checks them here. recorded: environments are not played again where
    the run's log has all their answers. Raises ValueError for a folder without a run, and
    for a run that was altered.
    """

    def __init__(
        self,
        path: Path,
        overrides: Mapping[str, Any] | None = None,
        checkpoints: list[Checkpoint] | None = None,
        recorded: bool = False,
    ):
        self.path, self.ledger = path, open_run(path)
        # Whoever drew the run's rollouts, this process draws them again: actors decide no bit.
        self.config = run_config(path, overrides or {}).model_copy(update={"pool": PoolConfig()})
        self.messages: list[str] = []  # a line for each checkpoint that cannot be used
        self.checkpoints = self._checkpoints() if checkpoints is None else checkpoints
        if self.config.threads:
            use_threads(self.config.threads)
        self.task = load_task(self.config.task.name, self.config.task.options, self.config.task.directory)
        with ExitStack() as on_failure:
            judge: Judge | RecordedEnvironments
            if recorded and can_be_recorded(self.task, self.config.loss.max_resamples):
                judge = RecordedEnvironments(path, self.task, self.config)
            else:
                judge = on_failure.enter_context(run_judge(self.config, self.task))
            self.model = base_model(self.config, path)
            equivalence = on_failure.enter_context(run_equivalence(self.config))
            # One process has all weights, whatever the run's ranks had.
            whole = self.config.model_copy(update={"parallel": ParallelConfig()})
            self.state: TrainState = make_state(whole, self.model, self.task, judge, equivalence=equivalence)
            self._open = on_failure.pop_all()
        self._first_weights = self.state.optimizer.weights.whole().clone()
        self._head = run_head(self.state, {"workers in use": self.state.parallel.n})
        self._recorder = self._new_recorder([])
        self._exact = False  # whether the state is the run's own after state.step steps
        if altered := compare_heads(self.ledger.head, self._head):
            self.__exit__()
            raise ValueError(
                f"replay: {path} cannot be repeated, since what it started from is another now; {altered}"
            )

    def _checkpoints(self) -> list[Checkpoint]:
        usable = []
        for folder in checkpoint_folders(self.path):
            checkpoint, damage = usable_checkpoint(folder, self.ledger, self.config)
            if checkpoint is not None:
                usable.append(checkpoint)
            else:
                self.messages.append(f"{damage}; not used")
        return usable

    def replay(
        self,
        step: int,
        until: int | None = None,
        trace: Path | None = None,
        trace_update: int = 0,
        before: Callable[[TrainState], None] | None = None,
        after: Callable[[StepRecord], None] | None = None,
    ) -> Replay:
        """Do the steps up to `until` (default `step`) again, from the nearest state at or before `step`.

        That is the newest checkpoint, or where an earlier replay ended with the ledger's bits.

        trace: a file; every operation of update number `trace_update` of step `step` is written to it.
        before: called with the state before each step. after: called after each step that has the ledger's
        bits. Raises ValueError for steps that the ledger does not hold, and for a trace that cannot be made
        (see check_trace).
        """
        until, recorded = step if until is None else until, len(self.ledger.lines)
        if not 0 <= step <= until < recorded:
            raise ValueError(
                f"replay: steps {step} to {until} must lie in 0 to {recorded - 1}, "
                f"the steps that {self.ledger.path} holds"
            )
        state = self.state
        if trace is not None:
            check_trace(state, trace, trace_update)
        first = self._go_to(step)
        self._exact = False
        while state.step <= until:
            line = self.ledger.lines[state.step]
            if before:
                before(state)
            if trace is not None and state.step == step:
                record = trace_step(state, self._recorder, trace, trace_update)
            else:
                record = train_step(state, self._recorder)
            if difference := compare_lines(self.ledger.head, line, self.last_line):
                return Replay(first, line.step, difference)
            if after:
                after(record)
        self._exact = True
        return Replay(first, until, None)

    def passes(self, steps: Iterable[int]) -> list[tuple[int, int]]:
        """The first and last step of each pass in which replays of `steps`, ascending, do steps again.

        A pass begins at a checkpoint or at step 0, and goes on over the steps until a checkpoint is nearer.
        """
        passes: list[tuple[int, int]] = []
        for step in steps:
            start = self._start(step)
            if passes and start <= passes[-1][1] + 1:
                passes[-1] = (passes[-1][0], step)
            else:
                passes.append((start, step))
        return passes

    def _checkpoint(self, step: int) -> Checkpoint | None:
        return next((c for c in self.checkpoints if c.step <= step), None)

    def _start(self, step: int) -> int:
        """The step of the newest checkpoint at or before `step`; 0 without one."""
        checkpoint = self._checkpoint(step)
        return checkpoint.step if checkpoint else 0

    def _go_to(self, step: int) -> int:
        """Bring the state to the nearest step at or before `step`, and the ledger with it. Returns this step.

        It goes on from where it stands, if no checkpoint is nearer. Else the checkpoint is restored, and
        without one the state goes back to before the first step.
        """
        state = self.state
        if self._exact and self._start(step) <= state.step <= step:
            return state.step
        if (checkpoint := self._checkpoint(step)) is not None:
            restore(state, checkpoint)
        else:
            rewind(state, self._first_weights)
        self._recorder = self._new_recorder(self.ledger.lines[: state.step])
        return state.step

    def _new_recorder(self, before: list[Line]) -> Recorder:
        """A recorder whose ledger is in memory only. before: the lines of the steps that are done."""
        previous = LedgerFile(self.ledger.path, self.ledger.head, before)
        return Recorder(None, self._head, self.config.ledger, self.state.optimizer, previous)

    @property
    def last_line(self) -> Line:
        """The line that the ledger would have of the last step that was done again."""
        return self._recorder.ledger.last

    def __enter__(self) -> "Replayer":
        return self

    def __exit__(self, *_: object) -> None:
        with self._open:
            self.state.close()
