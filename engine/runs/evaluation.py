"""The held-out evaluation of a run, and of both policies where the sampler's is not the trainer's."""

from collections.abc import Sequence

from ...files.reading import shown
from ...kernels.philox import Stream
from ...verify.mismatch import mean, standard_error
from ..config.run_config import Config
from ..rollout.episodes import Episodes
from ..rollout.types import GenerationParams, RngKey, Sampler
from ..tasks.base import Task
from ..tasks.loading import problems_of
from ..tasks.problem import Problem
from ..train.state import TrainState
from .held_out import (
    ACCURACY,
    BASE_REWARD,
    MEAN_REWARD,
    SAMPLER_REWARD,
    SAMPLER_TRAINING_REWARD,
    TRAINING_REWARD,
)

# Two policies are called different where their mean rewards are this many standard errors apart.
_ERRORS_APART = 3.0


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
        self._compares = config.evaluation.both_policies and config.sampler_differs
        takes_training = config.evaluation.every and (config.evaluation.training or self._compares)
        self._training = state.problems[: config.evaluation.problems] if takes_training else []
        self._warned = False
        state.player.check(self._problems, config.sampling.max_tokens, state.policy.config.max_positions)

    def due(self, step: int) -> set[str]:
        """The mean rewards that the metrics of step number `step` hold, by name."""
        done, cfg = step + 1, self._config
        if not self._problems:
            return set()
        is_due = done == cfg.steps or done % cfg.evaluation.every == 0
        return ({MEAN_REWARD} if is_due else set()) | ({BASE_REWARD} if step == 0 else set())

    def base_metrics(self) -> dict[str, float]:
        """The mean reward of the policy that the run begins with; nothing where a step is done already.

        It is a metric of step 0, the first line that a run writes.
        """
        if not self._problems or self._state.step:
            return {}
        return {BASE_REWARD: self._of_held_out(self._state.evaluator).mean_reward}

    def metrics(self) -> tuple[dict[str, float], str | None]:
        """The mean reward of the current policy, where it is due after the steps done so far; else nothing.

        Of a reward that is 0 or 1, the accuracy as well. Where reasonings are cut at budgets, also the mean
        reward at each. Where the sampler differs from the trainer, the rewards of both policies.

        The second is a line for people where the two policies differ by more than chance. It is None where
        they do not, and where such a line was given before, until the last step.
        """
        if MEAN_REWARD not in self.due(self._state.step - 1):
            return {}, None
        result = self._of_held_out(self._state.evaluator)
        accuracy = {} if result.accuracy is None else {ACCURACY: result.accuracy}
        at_budgets = {f"eval/reward_at_{b}": mean for b, mean in result.reward_at_budgets.items()}
        metrics = {MEAN_REWARD: result.mean_reward} | accuracy | at_budgets
        if not self._training:
            return metrics, None
        training = self._of_training(self._state.evaluator)
        metrics[TRAINING_REWARD] = training.mean_reward
        sampler_metrics, line = self._of_sampler(result, training) if self._compares else ({}, None)
        return metrics | sampler_metrics, line

    def _of_sampler(self, held_out: Episodes, training: Episodes) -> tuple[dict[str, float], str | None]:
        """The metrics of the sampler's policy, and the line. held_out, training: of the trainer's policy."""
        sampler = self._state.sampler
        pairs = {
            "training": (self._of_training(sampler), training),
            "held-out": (self._of_held_out(sampler), held_out),
        }
        metrics = {
            SAMPLER_TRAINING_REWARD: pairs["training"][0].mean_reward,
            SAMPLER_REWARD: pairs["held-out"][0].mean_reward,
        }
        lines = [line for problems, pair in pairs.items() if (line := _difference(*pair, problems))]
        if not lines or (self._warned and self._state.step < self._config.steps):
            return metrics, None
        self._warned = True
        return metrics, f"your curve is the sampler's, and the trainer's policy is saved: {'; '.join(lines)}"

    def _of_held_out(self, sampler: Sampler) -> Episodes:
        return self._play(sampler, self._problems, self._config.evaluation.temperature, Stream.EVALUATE)

    def _of_training(self, sampler: Sampler) -> Episodes:
        temperature = self._config.sampling.temperature
        return self._play(sampler, self._training, temperature, Stream.EVALUATE_TRAINING)

    def _play(
        self, sampler: Sampler, problems: Sequence[Problem], temperature: float, stream: Stream
    ) -> Episodes:
        """The rewards of what `sampler` draws. Its random keys are of a stream that training never uses."""
        state, cfg = self._state, self._config
        sampling_params = cfg.sampling.sampling_params._replace(temperature=temperature)
        generation_params = GenerationParams(
            sampling_params, cfg.evaluation.num_generations, cfg.sampling.max_tokens, state.tokenizer.stop_ids
        )
        return state.player.play(sampler, problems, generation_params, RngKey(cfg.seed, state.step, stream))

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


def _difference(by_sampler: Episodes, by_trainer: Episodes, problems: str) -> str | None:
    """How much better the sampler's policy is, or worse; None where chance explains it.

    Both have the same problems, so the difference is of each problem, and its error over problems. problems:
    what they are called.
    """
    a, b = (episodes.rewards.mean(axis=1) for episodes in (by_sampler, by_trainer))
    difference, error = mean(a - b), standard_error(a - b, [1] * len(a))
    if not abs(difference) > _ERRORS_APART * error:  # the error of one problem is NaN
        return None
    return (
        f"on {problems} problems the sampler earns {a.mean():.3f}, the trainer {b.mean():.3f} "
        f"(difference {difference:+.3f}, standard error {error:.3f})"
    )
