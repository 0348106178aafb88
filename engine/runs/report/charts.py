"""The charts of the page: which metric, and what a person should know about it."""

from dataclasses import dataclass

from ..held_out import MEAN_REWARD, SAMPLER_REWARD, SAMPLER_TRAINING_REWARD, TRAINING_REWARD


@dataclass(frozen=True)
class Chart:
    """A chart of one metric by step. docs/metrics.md says more about each metric."""

    metric: str
    title: str
    unit: str
    what: str
    healthy: str
    red_flag: str
    absent: str = ""  # why a run may lack the metric; such a chart is named where it is missing
    smooth: bool = True  # whether the page may smooth the line; a count is drawn as it is
    zero: bool = True  # whether the axis begins at 0


# Why most runs have no rewards of two policies.
_ONE_POLICY = "sampler and trainer have one policy, or evaluation.both_policies is off"

# The charts of each section of the page.
SECTIONS = {
    "Learning": (
        Chart(
            "reward/mean",
            "Reward",
            "",
            "Mean reward of the step's completions.",
            "It rises.",
            "It falls below 0.8 of its peak and stays there.",
        ),
        Chart(
            MEAN_REWARD,
            "Held-out reward",
            "",
            "Mean reward on problems that are not trained on, by steps done. At 0: the model that the run "
            "began with. It is the accuracy where a reward is 0 or 1.",
            "It rises with the reward.",
            "It falls while the reward rises: the training set is learnt by heart.",
            absent="evaluation.every is 0, or the task has no held-out problems",
            smooth=False,
        ),
        Chart(
            SAMPLER_REWARD,
            "Held-out reward, sampler's policy",
            "",
            "The same problems, drawn by the sampler. What is saved is the trainer's policy: the chart "
            "before.",
            "It is that of the trainer's policy.",
            "It is above that: the curve of the reward is better than the model that is saved.",
            absent=_ONE_POLICY,
            smooth=False,
        ),
        Chart(
            TRAINING_REWARD,
            "Training problems, trainer's policy",
            "",
            "Mean reward of the trainer's policy on training problems, at the training temperature.",
            "It follows the reward.",
            "It is below the reward, which is the sampler's.",
            absent=_ONE_POLICY,
            smooth=False,
        ),
        Chart(
            SAMPLER_TRAINING_REWARD,
            "Training problems, sampler's policy",
            "",
            "The same problems, drawn by the sampler.",
            "It is that of the trainer's policy.",
            "It is above that.",
            absent=_ONE_POLICY,
            smooth=False,
        ),
        Chart(
            "entropy",
            "Entropy",
            "nats",
            "Mean entropy of the distributions that the tokens were drawn from.",
            "It falls slowly.",
            "It drops to 0 within a few steps, or rises while the reward falls.",
        ),
        Chart(
            "response_len/mean",
            "Length of a completion",
            "tokens",
            "Mean length, the stop token included.",
            "It is steady, or grows with the reward.",
            "It runs up to sampling.max_tokens.",
            zero=False,
        ),
        Chart(
            "grad_norm",
            "Gradient norm",
            "",
            "Global L2 norm of the gradient before clipping.",
            "It is steady.",
            "It jumps, or is 0 for many steps.",
        ),
        Chart(
            "reward/std",
            "Spread of the rewards",
            "",
            "Standard deviation of the rewards of a step.",
            "It is above 0.",
            "It is 0: nothing is learnt in this step.",
        ),
        Chart(
            "groups/all_equal",
            "Groups without a signal",
            "groups",
            "Groups whose completions all have the same reward. They give no gradient.",
            "It stays well below the number of prompts of a step.",
            "It is near that number: the problems are too easy or too hard.",
            smooth=False,
        ),
        Chart(
            "completions/cut",
            "Completions cut short",
            "completions",
            "Completions that reached sampling.max_tokens without a stop token.",
            "It is near 0.",
            "It is most of them: raise sampling.max_tokens.",
            smooth=False,
        ),
        Chart(
            "lr",
            "Learning rate",
            "",
            "Learning rate of the step's last update.",
            "It follows optimizer.schedule.",
            "It is 0 before the run ends.",
            smooth=False,
        ),
    ),
    "Exactness": (
        Chart(
            "mismatch/max_abs",
            "Mismatch: largest |Δlogp|",
            "nats",
            "Largest difference between the trainer's and the sampler's log-probability of one token.",
            "It is 0.0 at every step.",
            "It is anything else in an exact run; it rises with the step in another.",
            smooth=False,
        ),
        Chart(
            "mismatch/k3",
            "Mismatch: KL (k3)",
            "nats a token",
            "Estimate of KL(sampler || trainer).",
            "It is 0.0 at every step.",
            "It rises with the step: the two engines drift apart.",
            smooth=False,
        ),
        Chart(
            "mismatch/k3_sequence",
            "Mismatch: KL of a sequence (k3)",
            "nats a sequence",
            "Estimate of KL(sampler || trainer) of whole completions: the length counts.",
            "It is 0.0 at every step.",
            "It comes near 1: a completion says little about the trainer's policy.",
            smooth=False,
        ),
        Chart(
            "mismatch/frac_equal",
            "Tokens with equal bits",
            "share",
            "Share of the tokens whose log-probability has the same bits in trainer and sampler.",
            "It is 1 at every step.",
            "It is below 1 in an exact run; it is 0 where the weights or the temperature are others.",
            smooth=False,
        ),
        Chart(
            "gradient/cosine_own",
            "Gradient: cosine with the exact one",
            "",
            "The gradient of the sampler's rollouts, as the run corrects it, against those of exact "
            "rollouts.",
            "It is that of two exact gradients, beside it, within the noise.",
            "It lies below that in most steps: the gradient has a bias.",
            absent="monitor.gradient is 0",
            zero=False,
        ),
        Chart(
            "gradient/cosine_floor",
            "Gradient: cosine of two exact ones",
            "",
            "Two gradients of exact rollouts of the same prompts: what the noise of a step leaves.",
            "It is well above 0.",
            "It is near 0: a step is too small to show a direction.",
            absent="monitor.gradient is 0",
            zero=False,
        ),
        Chart(
            "staleness/k3",
            "Staleness: KL (k3)",
            "nats a token",
            "The trainer's newest weights against those that the tokens were drawn with.",
            "It is small and steady.",
            "It rises with the step: the updates are too large.",
            absent="every update uses tokens of the current weights, so there is none",
        ),
        Chart(
            "staleness/versions",
            "Staleness: updates",
            "updates",
            "Updates by which the sampler's weights are older than the trainer's.",
            "It stays within max_staleness.",
            "It is always max_staleness.",
            absent="max_staleness is 0",
            smooth=False,
        ),
        Chart(
            "ref/k3",
            "Distance from the reference: KL (k3)",
            "nats a token",
            "Estimate of KL(policy || frozen reference).",
            "It grows slowly, then levels off.",
            "It grows without bound.",
            absent="loss.kl_coef is 0",
        ),
        Chart(
            "scaling/scale",
            "Loss scale",
            "",
            "Factor on the loss that keeps small fp16 gradients from becoming 0.",
            "It is steady, or doubles now and then.",
            "It falls again and again.",
            absent="the loss is not scaled (only float16 needs it)",
            smooth=False,
            zero=False,
        ),
        Chart(
            "scaling/skipped",
            "Skipped updates",
            "0 or 1",
            "1 where a gradient overflowed and the update was skipped.",
            "It is 0 almost always.",
            "It is 1 in several steps in a row; ten end the run.",
            absent="the loss is not scaled",
            smooth=False,
        ),
    ),
    "Speed": (
        Chart(
            "perf/tokens_per_s",
            "Tokens per second",
            "tokens/s",
            "Completion tokens of a step, divided by its seconds.",
            "It is steady.",
            "It falls while the lengths stay equal.",
        ),
        Chart(
            "pool/trainer_idle",
            "Trainer waits for rollouts",
            "share of the step",
            "Share of a step in which the trainer waits for the actors.",
            "It is near 0 after the first step.",
            "It is high: the actors are too few, or too slow.",
            absent="no actors draw (pool.engine)",
        ),
        Chart(
            "pool/actors_idle",
            "Actors wait for work",
            "share of their time",
            "Share of the actors' time in which they do not draw.",
            "It is low: actors are what costs.",
            "It is high: the trainer is the slower part; fewer actors do, or a larger max_staleness.",
            absent="no actors draw (pool.engine)",
        ),
        Chart(
            "perf/mfu",
            "GPU utilisation (MFU)",
            "share of peak",
            "Share of the GPU's peak rate that forward and backward reach.",
            "It is steady.",
            "It is below 0.05: the GPU waits for the host.",
            absent="no GPU with a known peak rate",
        ),
        Chart(
            "perf/peak_memory_bytes",
            "Peak memory",
            "bytes",
            "The most memory held at once so far.",
            "It is steady after two steps.",
            "It grows from step to step.",
            smooth=False,
        ),
    ),
}
CHARTS = [chart for charts in SECTIONS.values() for chart in charts]

# The stations of a step: metric, name, and whether it belongs to sampling or to training. What the stations
# leave of time/sample_s and time/train_s is shown as the rest.
STATIONS = (
    ("time/prompts_s", "reading prompts", "sample"),
    ("time/decode_s", "drawing tokens", "sample"),
    ("time/reward_s", "rewards", "sample"),
    ("time/environment_s", "environments", "sample"),
    ("time/score_s", "older and reference weights", "train"),
    ("time/forward_backward_s", "forward and backward", "train"),
    ("time/optimizer_s", "optimizer", "train"),
    ("time/sync_s", "handing over weights", "train"),
    ("time/ledger_s", "ledger", "train"),
)
# Further metrics that the page computes with.
ALSO = ("step", "tokens", "time/sample_s", "time/train_s")
