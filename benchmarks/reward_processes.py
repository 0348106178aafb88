"""What it costs to compute a user's reward in processes of its own: steps of the demo's shape, by turns.

    python benchmarks/reward_processes.py [--turns 15]

Both sides take their steps in one run, in turn: with the reward in processes (engine/tasks/executor.py), and
with the same function called by the trainer. The model has the demo's shape and random weights.
"""

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from zerokl.benchmarks.device.runs import write_preset
from zerokl.engine.config.config_file import load_config
from zerokl.engine.runs.setup import make_state, settled
from zerokl.engine.tasks.loading import load_task
from zerokl.engine.tasks.rewards import Reward, open_reward
from zerokl.engine.train.step import train_step

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
REWARD = "mytask:closeness"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15)
    turns = parser.parse_args().turns
    sys.path.append(str(EXAMPLES))
    import mytask

    with tempfile.TemporaryDirectory() as scratch:
        model = write_preset("tiny", Path(scratch))
        config = settled(load_config(None, "demo", {"model": str(model), "task.reward": REWARD}))
        task = load_task(config.task.name, config.task.options)
        began_s = time.perf_counter()
        with open_reward(task, config.task.reward_settings) as processes:
            print(f"start of the processes: {time.perf_counter() - began_s:.2f} s")
            sides = {"in processes": processes, "by the trainer": Reward(mytask.closeness)}
            steps_s = {side: [] for side in sides}
            rewards_s = {side: [] for side in sides}
            with closing(make_state(config, model, task, processes)) as state:
                train_step(state)
                for _ in range(turns):
                    for side, state.player.reward in sides.items():
                        began_s = time.perf_counter()
                        metrics = train_step(state).metrics
                        steps_s[side].append(time.perf_counter() - began_s)
                        rewards_s[side].append(metrics["time/reward_s"])
    ratios = sorted(a / b for a, b in zip(*steps_s.values(), strict=True))
    for side in sides:
        step_s, reward_s = statistics.median(steps_s[side]), statistics.median(rewards_s[side])
        print(f"{side}: step {step_s:.3f} s, of it rewards {1e3 * reward_s:.1f} ms")
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    print(f"ratio of a turn: {statistics.median(ratios):.3f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
