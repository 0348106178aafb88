"""The held-out evaluation of a run."""

from ...files.reading import shown
from ...kernels.philox import Stream
from ..config import Config
from ..rollout.episodes import Episodes
from ..rollout.types import GenerationParams, RngKey
from ..tasks.base import Task
from ..tasks.loading import problems_of
from ..train.state import TrainState
from .held_out import ACCURACY, BASE_REWARD, MEAN_REWARD


class HeldOut:
    """The held-out problems of a run; none where evaluation is off.

    config: says how they are evaluated; the state's own where none is given.

    Raises ValueError for a prompt that is too long, and for an answer that the reward cannot read.
    """

    def __init__(self, state: TrainState, task: Task, config: Config | None = None):
        self._config = config = config or state.config
        problems = problems_of(task, config.task.name, "held_out", config.task.directory)
        problems = problems[: config.evaluation.problems]
        self._state, self._problems = state, problems if config.evaluation.every else []
        state.player.check(self._problems, config.sampling.max_tokens, state.policy.config.max_positions)

    def base_metrics(self) -> dict[str, float]:
        """The mean reward of the policy that the run begins with; nothing where a step is done already.

        It is a metric of step 0, the first line that a run writes.
        """
        return {BASE_REWARD: self._evaluate().mean_reward} if self._problems and self._state.step == 0 else {}

    def metrics(self) -> dict[str, float]:
        """The mean reward of the current policy, where it is due after the steps done so far; else nothing.

        Of a reward that is 0 or 1, the accuracy as well. Where reasonings are cut at budgets, also the mean
        reward at each.
        """
        done, cfg = self._state.step, self._config
        if not self._problems or not (done == cfg.steps or done % cfg.evaluation.every == 0):
            return {}
        result = self._evaluate()
        accuracy = {} if result.accuracy is None else {ACCURACY: result.accuracy}
        at_budgets = {f"eval/reward_at_{b}": mean for b, mean in result.reward_at_budgets.items()}
        return {MEAN_REWARD: result.mean_reward} | accuracy | at_budgets

    def _evaluate(self) -> Episodes:
        """The rewards of the current policy. Their random keys are of a stream that training never uses."""
        state, cfg = self._state, self._config
        sampling_params = cfg.sampling.sampling_params._replace(temperature=cfg.evaluation.temperature)
        generation_params = GenerationParams(
            sampling_params, cfg.evaluation.num_generations, cfg.sampling.max_tokens, state.tokenizer.stop_ids
        )
        rng_key = RngKey(cfg.seed, state.step, Stream.EVALUATE)
        return state.player.play(state.evaluator, self._problems, generation_params, rng_key)

    def overlap(self) -> str | None:
        """A line about held-out prompts that are also trained on; None where there are none."""
        trained = {problem.prompt for problem in self._state.problems}
        shared = [problem.prompt for problem in self._problems if problem.prompt in trained]
        if not shared:
            return None
        return (
            f"{len(shared)} of {len(self._problems)} held-out prompts are training prompts as well, such as "
            f"{shown(shared[0][:60])}: the held-out reward counts what is learnt by heart"
        )
