"""A torch profiler's trace of one step: `zerokl train --profile N`.

The trace is a JSON file for chrome://tracing or https://ui.perfetto.dev. It shows each operation of this
process, the kernels of its GPU, and the stations of the step by the names of their metrics (time/*_s). The
profiler changes no bit. It makes the step slower, so that step's metrics time/* and perf/* are no measure.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from ...files.writing import first_free
from ..display.terminal import console
from ..train.state import TrainState

FOLDER = "profile"


def check_profiled_step(step: int | None, first: int, steps: int) -> None:
    """Raise ValueError for a step that the run does not take. It takes the steps `first` to `steps` - 1."""
    if step is not None and not first <= step < steps:
        raise ValueError(
            f"profile ({step}) must be a step that this run takes, from {first} to {steps - 1}; "
            "the first step of a run is 0"
        )


@contextmanager
def profiled(state: TrainState, step: int | None, path: Path) -> Iterator[None]:
    """Write a trace of what runs inside this context, where the state's next step is `step`.

    path: the run's folder. With several ranks the first writes. With several workers the trace is of the
    first, which is this process.
    """
    if state.step != step or not state.ranks.first:
        yield
        return
    activities = [ProfilerActivity.CPU]
    if state.policy.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as trace:
        yield
    folder = path / FOLDER
    folder.mkdir(exist_ok=True)
    names = (f"step-{step:06d}.json" if n == 1 else f"step-{step:06d}-{n}.json" for n in count(1))
    target = first_free(folder / name for name in names)
    trace.export_chrome_trace(str(target))
    n = state.parallel.n
    others = f"; it is of the first of {n} workers, and --workers 1 shows all work" if n > 1 else ""
    console.print(f"saved {target}, for chrome://tracing or ui.perfetto.dev{others}")
