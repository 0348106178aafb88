"""One logged completion, in the same words for every framework.

Shapes: C completion tokens.
"""

from dataclasses import dataclass, replace

import numpy as np

from ...kernels.sampling_params import SamplingParams

TokenIds = tuple[int, ...]
# A NaN that the log itself holds. The NaN of numpy stands where a log has no number. As with R's NA, the
# bits tell the two apart; whoever counts them asks before any arithmetic.
LOGGED_NAN = np.array([0x7FC0_0001], np.uint32).view(np.float32)[0]
# What a line without a mask has, as long as it needs it: a log has 10^6 lines.
_ALL_DRAWN = np.ones(1 << 16, bool)
_ALL_DRAWN.flags.writeable = False


def least_and_most(x: np.ndarray) -> tuple[float, float]:
    """The smallest and the largest number of x; both NaN where one is. x.min() takes four times as long."""
    return x.item(x.argmin()), x.item(x.argmax())


def is_logged_nan(x: np.ndarray) -> np.ndarray:
    """Which of some fp32 values are a NaN that the log itself holds, bool."""
    return x.view(np.uint32) == LOGGED_NAN.view(np.uint32)


@dataclass(frozen=True)
class LoggedRollout:
    """A completion with whatever its log says about it. None stands for what the log does not say.

    A log of text has prompt_text and completion_text in place of the ids.
    """

    prompt_ids: TokenIds | None = None
    completion_ids: TokenIds | None = None
    # [C] fp32, of the sampler and of the trainer; NaN where there is none. A reader hands over what the log
    # holds: hypotheses/value_checks.py takes out what is no log-probability.
    logprobs: np.ndarray | None = None
    trainer_logprobs: np.ndarray | None = None
    # [C] bool: which tokens the model drew. The others came from tools, templates or the user.
    mask: np.ndarray | None = None
    sampling_params: SamplingParams | None = None
    # The oldest and the newest weights that drew a token, and [C] int64 with the version for each token.
    weight_span: tuple[int, int] | None = None
    token_versions: np.ndarray | None = None
    # Decimals that are left of the sampler's and of the trainer's logprobs; None where none was cut.
    decimals: int | None = None
    trainer_decimals: int | None = None
    # For each token the ids that it could be drawn from, or None for all.
    sampling_mask: tuple[TokenIds | None, ...] | None = None
    routed_experts: np.ndarray | None = None  # [tokens, layers, k]; the tokens may include the prompt
    reward: float | None = None
    advantage: float | tuple[float, ...] | None = None
    step: int | None = None
    prompt: int | str | None = None  # which prompt of the step; completions of one prompt are a group
    sample: int | str | None = None  # which completion of the group
    turn: int | None = None  # which turn of the completion, where each turn has a prompt of its own
    truncated: bool | None = None  # whether a limit of tokens ended it
    prompt_text: str | None = None
    completion_text: str | None = None

    def drawn(self) -> np.ndarray:
        """Which tokens were drawn, [C] bool."""
        if self.mask is not None:
            return self.mask
        count = len(self.completion_ids)
        return _ALL_DRAWN[:count] if count <= len(_ALL_DRAWN) else np.ones(count, bool)

    def of_version(self, version: int | None) -> np.ndarray:
        """Which tokens these weights drew, [C] bool; None is any weights."""
        if version is None:
            return self.drawn()
        if self.token_versions is not None:
            return self.drawn() & (self.token_versions == version)
        return self.drawn() & (self.weight_span == (version, version))

    def with_trainer(self, logprobs: np.ndarray) -> "LoggedRollout":
        """This completion with another trainer column, [C] fp32, whose numbers were not cut."""
        return replace(self, trainer_logprobs=logprobs, trainer_decimals=None)

    def drawn_with(self, params: SamplingParams | None) -> "LoggedRollout":
        """This completion, drawn with these parameters where its log says none."""
        if params is None or self.sampling_params is not None:
            return self
        return replace(self, sampling_params=params)

    def check_scored(self, remedy: str) -> None:
        """Raise ValueError where there are no token ids, or no logprobs of the sampler. remedy: or empty."""
        told = f"; {remedy}" if remedy else ""
        if self.completion_ids is None:
            raise ValueError(f"holds text and no token ids{told}")
        if self.logprobs is None:
            raise ValueError(f"holds no logprobs of the sampler{told}")

    def tolerance(self, trainer_column: bool = True) -> float:
        """Half of the last decimal of each rounded column: equal logprobs can differ by this much.

        trainer_column: the trainer's logprobs are the log's; a model's own are not rounded.
        """
        columns = (self.decimals, self.trainer_decimals if trainer_column else None)
        return sum(0.5 * 10.0**-decimals for decimals in columns if decimals is not None)
