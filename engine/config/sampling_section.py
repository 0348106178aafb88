"""The sections `sampling`, `native` and `pool` of the configuration: how completions are drawn."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ...kernels.sampling_params import SamplingParams, bias_by_id, refuse_penalties
from .section import WHERE_SET, PlannedRun, Section, Temperature, free, rule, setting


def _in_order(ids: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Equal sets are equal settings, so that the ledger chains the same."""
    return None if ids is None else tuple(sorted(set(ids)))


def _by_id(logit_bias: Any) -> Any:
    """The same for a table whose keys are ids."""
    if not isinstance(logit_bias, dict):
        return logit_bias
    return {str(token): bias for token, bias in bias_by_id(logit_bias).items()}


class SamplingConfig(Section):
    """How completions are drawn."""

    temperature: Temperature = setting(1.0, gt=0, common=True)
    """Temperature of the softmax. 0 (greedy) is refused: a greedy policy has no policy gradient."""
    top_k: int = setting(0, ge=0, common=True)
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = setting(1.0, gt=0, le=1, common=True)
    """Keep the most likely tokens until their probabilities together reach this; 1 keeps all."""
    min_p: float = setting(0.0, ge=0, le=1, head=WHERE_SET)
    """Keep the tokens with at least this share of the largest probability; 0 keeps all."""
    logit_bias: Annotated[dict[str, float], BeforeValidator(_by_id)] = setting(
        default_factory=dict, head=WHERE_SET
    )
    """Added to the logits of single tokens, in nats: { 17 = -2.5 } for the token id 17. -100 to 100."""
    allowed_token_ids: Annotated[tuple[int, ...] | None, AfterValidator(_in_order)] = setting(
        None, head=WHERE_SET
    )
    """Draw only these token ids; without it, any. A stop token that is missing here ends no completion."""
    max_tokens: int = setting(
        16,
        ge=1,
        common=True,
        also_called="max_completion_length max_new_tokens max_response_length response_length "
        "generate_max_len rollout_max_response_len",
    )
    """Tokens of a completion, or of a turn, at most, the end-of-sequence token included."""
    answer_max_tokens: int = setting(0, ge=0, head=WHERE_SET)
    """Tokens of an answer at most, the end-of-sequence token included (advantage brpo); 0 is max_tokens."""

    @rule
    def _answers_of_brpo(self, run: PlannedRun) -> str | None:
        if self.answer_max_tokens and not run.config.loss.draws_answers:
            return (
                "sampling.answer_max_tokens is of reasonings that are cut at budgets, and this loss has "
                'none; leave it out, or set loss.preset = "brpo"'
            )

    @property
    def sampling_params(self) -> SamplingParams:
        """The distribution that tokens are drawn from, as the kernels take it."""
        logit_bias = {int(token): bias for token, bias in self.logit_bias.items()}
        return SamplingParams.of(
            self.temperature, self.top_k, self.top_p, self.min_p, logit_bias, self.allowed_token_ids
        )

    @model_validator(mode="before")
    @classmethod
    def _no_penalty(cls, values: Any) -> Any:
        if isinstance(values, dict):
            refuse_penalties("sampling", values)
        return values

    @model_validator(mode="after")
    def _ids(self) -> "SamplingConfig":
        self.sampling_params.check()
        return self


class NativeConfig(Section, head=free("limits of the sampler; by the law they decide no bit")):
    """The native sampler. These settings change no bit of the result."""

    max_concurrency: int = Field(64, ge=1)
    """Samples drawn at once."""
    max_batch_tokens: int = Field(0, ge=0)
    """Tokens of one forward that reads prompts; longer ones are read in chunks. 0 is 1024, on a GPU 16384."""
    cache_bytes: int = Field(0, ge=0)
    """Upper limit of the key-value cache, bytes. 0 is 4 GiB on a CPU, and 0.3 of the free memory of a GPU."""
    speculate: int = Field(0, ge=0, le=32)
    """Tokens that are guessed ahead in one turn of a sample, at most; 0 guesses none. A guess is compared
    with the token that its key draws.
    """

    @rule
    def _guesses_of_the_native_sampler(self, run: PlannedRun) -> str | None:
        if self.speculate and run.config.sampler != "native":
            return (
                f'native.speculate ({self.speculate}) with sampler ("{run.config.sampler}"): other engines '
                "accept a guess by chance, and do not compare it with the token that its key draws, which "
                'changes the tokens; set it to 0, or sampler = "native" (vllm-zerokl has vllm.speculate)'
            )


class PoolConfig(Section, head=free("who draws the rollouts, and where; by the law this decides no bit")):
    """Sampler actors on any nodes, which draw while the trainer trains. They change no bit of the result."""

    engine: Literal["", "ray"] = setting("", needs_whole=bool)
    """ray: actors of a Ray cluster draw the training rollouts (the extra `ray` of the package). Empty: the
    trainer's own processes draw them, before they train.
    """

    @rule
    def _actors(self, run: PlannedRun) -> str | None:
        if self.engine and run.config.lag is None:
            return (
                f'pool.engine ("{self.engine}") with max_staleness ({run.config.max_staleness}) needs '
                'staleness_schedule = "lagged": a periodic sampler waits for the step that is still trained'
            )
        late = run.config.perturb.delay > 0
        if self.engine and (run.config.sampler != "native" or late or run.config.loss.trains_given):
            return (
                f'pool.engine ("{self.engine}") needs sampler = "native", perturb.delay = 0, and a loss of '
                "drawn tokens (not dpo or verifree): actors are native samplers; leave it out, or the others"
            )
        if run.ranks > 1 and self.engine:
            return (
                f'ranks ({run.ranks}) with pool.engine ("{self.engine}"): one process of the trainer runs '
                'this; set pool.engine = "", or start one process'
            )

    address: str = ""
    """Address of the Ray cluster, such as auto or HOST:PORT. Empty starts one here, for the run."""
    actors: int = Field(1, ge=1, le=1 << 16)
    """Actors that draw. One that ends, or takes too long, is replaced."""
    cpus: float = Field(1.0, gt=0, le=1 << 16)
    """CPUs that an actor reserves; it has as many threads, rounded down, and one at least."""
    gpus: float = Field(0.0, ge=0, le=16)
    """GPUs that an actor reserves. No GPU has run an actor yet."""
    batch: int = Field(0, ge=0)
    """Requests that an actor is given at a time. 0 is an equal part of those that are ready for each actor,
    at most native.max_concurrency.
    """
    in_flight: int = Field(2, ge=1, le=64)
    """Such batches that an actor has at a time, the one that it draws included. The others wait."""
    timeout_s: float = Field(600.0, gt=0, le=1e6)
    """Seconds that an actor may take to start and for one batch. Then it is replaced, and the batch is drawn
    by another actor.
    """
