"""Steps that teach nothing: their gradient is exactly 0."""

from collections.abc import Mapping, Sequence

from ..train.state import StepRecord


def no_signal_line(record: StepRecord, before: Mapping[str, float] | None) -> str:
    """That the steps without signal begin here, and why; empty where they do not.

    before: the metrics of the step before, None for the first one.
    """
    m, groups, completions = record.metrics, len(record.episodes.rewards), len(record.episodes.rollouts)
    if m["grad_norm"] != 0.0 or (before is not None and before["grad_norm"] == 0.0):
        return ""
    cut = f"; {m['completions/cut']} of {completions} completions are cut" if m["completions/cut"] else ""
    return (
        f"step {m['step']}: no signal, the gradient is exactly 0: in {m['groups/all_equal']} of {groups} "
        f"groups all rewards are equal (mean {m['reward/mean']:.3g}){cut}"
    )


def no_signal_steps(grad_norms: Sequence[float]) -> str:
    """How many steps of a run had no signal, in a line; empty where each had one."""
    steps = sum(norm == 0.0 for norm in grad_norms)
    return f"no signal in {steps} of {len(grad_norms)} steps: their gradient was exactly 0" if steps else ""
