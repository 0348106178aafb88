"""The sections `task` and `environment` of the configuration: what the model learns, and from whom."""

from typing import Any, Literal

from pydantic import Field

from ..tasks.base import RewardSettings
from .section import WHERE_SET, Section, free, setting

_LIMIT = free("decides whether a run stops, not what it computes")
_LIMIT_OF_A_TURN = free("decides which trajectories end in time; the ledger chains how each ended")


class TaskConfig(Section):
    """What the model learns."""

    name: str = setting("add", common=True, replaces="task.")
    """add, sort, sums, countdown, jsonl, pairs; with an environment calculator, guesses, wordle, nim, python;
    or your own task as module:object. Given as a flag or in a grid, another name takes the place of all that
    the file or --preset chose in this section.
    """
    options: dict[str, Any] = setting(
        default_factory=dict, common=True, also_called="dataset dataset_name train_files prompt_data data"
    )
    """Arguments of the task, e.g. { max_value = 99, train = 512, held_out = 256 } for add."""
    reward: str = setting(
        "", common=True, also_called="reward_funcs reward_fn reward_function custom_rm_path"
    )
    """exact, numeric, math (engine/tasks/answers.py), or your own as module:function(problem, completion) ->
    float; empty is the task's own.
    """
    answer_prefix: str = setting("", head=WHERE_SET)
    """Text between a reasoning and its answer. The answer is the problem's, and its probability the reward
    (advantage verifree); or it is drawn (advantage brpo). A reasoning ends with the first token of this text,
    such as </think>, or at max_tokens. Empty: there are no reasonings.
    """
    equivalence: str = setting("", head=WHERE_SET)
    """Your own module:function(a, b) -> bool, which says whether the texts of two completions mean the same
    (loss.semantic_entropy); empty is equal text after strip(). It runs as rewards do, with their limits.
    """
    reward_processes: int = setting(
        0, ge=0, le=256, head=free("how the rewards are computed; a reward is a function of its arguments")
    )
    """Processes that compute rewards of yours, and math's; as many more for an equivalence of yours. 0 is one
    for each core, 16 at most.
    """
    reward_timeout_s: float = setting(300.0, gt=0, le=1e6, head=_LIMIT)
    """Seconds that one reward, or one group's equivalence, may take. What takes longer ends the run, and
    decides no bit.
    """
    reward_memory_bytes: int = setting(0, ge=0, head=_LIMIT)
    """Bytes of memory that each of these processes may ask for; 0 is half of the machine's memory."""
    directory: str = setting("", head=free("a place; the problems found there are chained instead"))
    """Folder in which modules, and relative names of files in options, are looked up; empty is the current
    one. A run writes down where it was started.
    """
    perfectible_only: bool = True
    """Train only on problems that the model solved sometimes but not always in `zerokl init`. This has no
    effect where the model folder names no such problems for this task.
    """
    problems: int = Field(0, ge=0)
    """Train on this many problems at most, the first ones; 0 is all."""

    @property
    def reward_settings(self) -> RewardSettings:
        """Which reward there is, and how it is computed."""
        return RewardSettings(
            self.name,
            self.options,
            self.directory,
            self.reward,
            self.reward_processes,
            self.reward_timeout_s,
            self.reward_memory_bytes,
        )


class EnvironmentConfig(Section, head=WHERE_SET):
    """Trajectories of many turns. Only a task that has an environment takes it."""

    max_turns: int = setting(8, ge=1, le=10_000, common=True)
    """Turns of a trajectory at most; in a game, of each player."""
    max_tokens: int = Field(0, ge=0)
    """Drawn tokens of a trajectory at most; 0 is as many as max_turns turns of sampling.max_tokens have."""
    context: int = Field(0, ge=0)
    """All tokens of a trajectory at most, those that nobody drew included; 0 is the model's context."""
    render: Literal["template", "append"] = "template"
    """How a later content is put into the chat template. template refuses a template that writes earlier
    turns in another way, or drops their thoughts; append keeps all turns as they were drawn.
    """
    processes: int = setting(
        0,
        ge=0,
        le=256,
        head=free("how environments are played; one is a function of its problem, key and turns"),
    )
    """Processes that play environments; 0 is one for each core, 16 at most. It changes no bit."""
    timeout_s: float = setting(60.0, gt=0, le=1e6, head=_LIMIT_OF_A_TURN)
    """Seconds that an environment may take to answer one turn. A trajectory that takes longer ends."""
    memory_bytes: int = setting(0, ge=0, head=_LIMIT_OF_A_TURN)
    """Bytes of memory that each of these processes may ask for; 0 is half of the machine's memory."""
