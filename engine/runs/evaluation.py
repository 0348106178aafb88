"""The held-out evaluation of a run."""

from ...kernels.philox import Stream
from ..rollout.evaluate import evaluate
from ..rollout.types import GenerationParams, RngKey
from ..tasks.base import Task
from ..tasks.loading import problems_of
from ..train.state import TrainState
from .setup import check_prompt_lengths

ACCURACY = "eval/accuracy"


class HeldOut:
    """The held-out problems of a run; none where evaluation is off.

    Raises ValueError for a prompt that is too long.
    """

    def __init__(self, state: TrainState, task: Task):
        config = state.config
        problems = problems_of(task, config.task.name, "held_out")[: config.evaluation.problems]
        self._state, self._problems = state, problems if config.evaluation.every else []
        self._prompt_ids = state.tokenizer.encode_problems(self._problems, task.chat)
        check_prompt_lengths(self._prompt_ids, self._problems, config, state.policy.config)

    def metrics(self) -> dict[str, float]:
        """The accuracy of the current policy, where it is due after the steps done so far; else nothing."""
        state, cfg = self._state, self._state.config
        last = state.step == cfg.steps
        if not self._problems or not (last or state.step % cfg.evaluation.every == 0):
            return {}
        sampling_params = cfg.sampling.sampling_params._replace(temperature=cfg.evaluation.temperature)
        generation_params = GenerationParams(
            sampling_params, cfg.evaluation.num_generations, cfg.sampling.max_tokens, state.tokenizer.stop_ids
        )
        rng_key = RngKey(cfg.seed, state.step, Stream.EVALUATE)
        problems, ids = self._problems, self._prompt_ids
        result = evaluate(
            state.evaluator, state.tokenizer, problems, ids, state.reward, generation_params, rng_key
        )
        return {ACCURACY: result.mean_reward}
