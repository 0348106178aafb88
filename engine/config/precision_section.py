"""Precision settings: the dtypes of the sampler and of the trainer, and the scaling of the loss."""

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, field_validator

from ...kernels.tile_tables import minor_version
from ...model.quantisation import KvQuantisation, Quantisation
from .section import WHERE_SET, PlannedRun, Section, differing, kept, rule, setting

SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def full_dtype(name: Any) -> Any:
    """torch's name of a dtype for its short name, such as bfloat16 for bf16. Anything else stays as it is."""
    return SHORT_DTYPES.get(name, name) if isinstance(name, str) else name


# In front of a Literal of dtypes: the short names are accepted too, and the full one is kept.
ShortNames = BeforeValidator(full_dtype)


def _known(text: str) -> str:
    if text:
        Quantisation.parse(text)
    return text


def _known_of_kv(text: str) -> str:
    if text:
        KvQuantisation.parse(text)
    return text


# Empty, or how weights, or keys and values, are quantised (model/quantisation.py).
QuantisationText = Annotated[str, AfterValidator(_known)]
KvQuantisationText = Annotated[str, AfterValidator(_known_of_kv)]


# How the ledger's head has the settings of loss scaling.
_SCALING = kept(
    "the scale of the loss changes no bit unless a gradient overflows or underflows, and then the hash of "
    "the gradient shows it"
)


class PrecisionConfig(Section):
    """Dtypes other than the compute dtype, and loss scaling.

    The sampler has the trainer's dtypes, unless a sampler_ key names another.
    """

    scaling: Literal["auto", "off", "static", "dynamic"] = setting("auto", head=_SCALING)
    """Loss scaling. auto is dynamic for float16 and off for the other dtypes, whose exponents need none."""
    scale: float = setting(65536.0, head=_SCALING)
    """The scale at the start; a power of two."""

    @rule
    def _scale_in_its_range(self, run: PlannedRun) -> str | None:
        in_range = self.minimum <= self.scale <= self.maximum
        if self.scaling in ("auto", "dynamic") and not in_range:
            return (
                f"precision.scale ({self.scale}) must lie between precision.minimum "
                f"({self.minimum}) and precision.maximum ({self.maximum})"
            )

    growth_interval: int = setting(100, ge=1, head=_SCALING)
    """Updates without overflow after which a dynamic scale is doubled."""
    backoff: float = setting(0.5, gt=0, lt=1, head=_SCALING)
    """A dynamic scale is multiplied by this at an overflow; a power of two."""
    minimum: float = setting(1.0, head=_SCALING)
    """The lowest value of a dynamic scale; a power of two."""
    maximum: float = setting(16777216.0, head=_SCALING)
    """The highest value of a dynamic scale; a power of two."""
    head_dtype: Annotated[Literal["compute", "float32"], ShortNames] = "compute"
    """Dtype of the logits: the compute dtype, or float32. With float32, hidden states and lm_head are
    multiplied in fp32, and the logits are not rounded.
    """
    cache_dtype: Annotated[Literal["compute", "bfloat16", "float16"], ShortNames] = "compute"
    """Dtype to which keys and values are rounded before attention reads them, in the sampler and in the
    trainer. Where this dtype is narrower than the compute dtype, the sampler's cache stores them in it: with
    float32 this halves the bytes.
    """
    router_dtype: Annotated[Literal["compute", "float32"], ShortNames] = setting(
        "compute", head=WHERE_SET, needs_experts=True
    )
    """Dtype of the router's logits in a mixture of experts: the compute dtype, as vLLM has it for Qwen3-MoE,
    or float32. With float32, hidden states and the router are multiplied in fp32, and the logits are not
    rounded.
    """

    @rule
    def _dtypes(self, run: PlannedRun) -> str | None:
        if run.config.sampler == "vllm-exact" and run.any_other("head_dtype", "cache_dtype"):
            return (
                "precision.head_dtype and cache_dtype, and those of the sampler: vLLM's own model has other "
                'kernels for them; set all to "compute"'
            )
        if run.config.sampler == "vllm-zerokl" and run.any_other("cache_dtype"):
            return (
                "precision.cache_dtype and sampler_cache_dtype: vLLM's cache holds the compute dtype; "
                'set both to "compute", or sampler = "native"'
            )
        if run.keyed_vllm and run.any_other("router_dtype"):
            return (
                "precision.router_dtype and sampler_router_dtype: inside vLLM routers compute in the compute "
                'dtype; set both to "compute", or sampler = "native"'
            )

    weights: QuantisationText = setting("", head=WHERE_SET, common=True, needs_whole=bool)
    """The matrices of attention, MLPs and experts are quantised to 8 bits and back, for sampler and trainer
    alike: FORMAT/SCALE, or FORMAT/SCALE/pow2 for scales that are powers of two. FORMAT: float8_e4m3fn,
    float8_e5m2, int8. SCALE, from the largest absolute value: tensor, row (of each output channel), block
    (128 x 128), block32 (32 x 32). Empty: they are not. Master weights stay fp32, and the gradient counts the
    rounding as the identity.
    """

    @rule
    def _no_adapters(self, run: PlannedRun) -> str | None:
        if run.config.lora.rank and self.weights:
            return (
                f'precision.weights ("{self.weights}") with lora.rank ({run.config.lora.rank}): this is not '
                "built with adapters; leave one out"
            )

    kv: KvQuantisationText = setting("", head=WHERE_SET)
    """Keys and values are quantised to 8 bits and back before attention reads them, for sampler and trainer
    alike: FORMAT/SCALE, or FORMAT/SCALE/pow2. FORMAT: float8_e4m3fn, float8_e5m2, int8. SCALE: unit (1, what
    is out of range is clipped; not for int8), or from the largest absolute value of each token, or of each
    head of each token (token_head). Empty: they are not. The cache stores them in the compute dtype, and the
    gradient counts the rounding as the identity.
    """

    @rule
    def _keys(self, run: PlannedRun) -> str | None:
        if (self.kv or run.config.perturb.kv) and run.any_other("cache_dtype"):
            return (
                f'precision.kv ("{self.kv}") and perturb.kv ("{run.config.perturb.kv}") with '
                "precision.cache_dtype or sampler_cache_dtype: each rounds keys and values; leave one out"
            )
        if run.config.sampler == "vllm-exact" and (self.kv or run.config.perturb.kv):
            return (
                f'precision.kv ("{self.kv}") and perturb.kv ("{run.config.perturb.kv}"): vLLM\'s own '
                'model has other kernels for them; leave them out, or set sampler = "vllm-zerokl"'
            )

    attention: Literal["vllm", "chunked-512"] = setting("vllm", head=WHERE_SET)
    """The order in which attention sums a row's keys, for sampler and trainer alike. vllm: one walk, as in
    vLLM's kernel. chunked-512: chunks of 512 keys, which are joined in ascending order, so that a GPU decodes
    long contexts by many programs, and the samples of a prompt share its chunks.
    """

    @rule
    def _order_of_sums(self, run: PlannedRun) -> str | None:
        if run.config.sampler == "vllm-exact" and self.attention != "vllm":
            return (
                f'precision.attention ("{self.attention}"): vLLM\'s own model sums a row in one walk; '
                'set it to "vllm", or sampler to "vllm-zerokl" or "native"'
            )

    state_prompts: Literal["each", "once"] = setting(
        "each", head=WHERE_SET, needs_whole=lambda value: value == "once"
    )
    """How training reads the prompt of several samples where layers keep a state (hybrids): each, again with
    every sample; or once, as in all other models. Then the samples' gradients of what the prompt left are
    added in fp32, one after another, and go through the prompt once. The gradient has other bits, and no
    log-probability.
    """

    @rule
    def _prompts_on_a_cpu(self, run: PlannedRun) -> str | None:
        if self.state_prompts == "once" and run.device == "cuda":
            return (
                'precision.state_prompts ("once"): it is built for CPUs; set it to "each", or device = "cpu"'
            )

    leaves: int = setting(1, ge=1, le=8, head=WHERE_SET)
    """Parts of every sum that tensor parallelism may cut: 1, 2, 4 or 8. Each part is an fp32 sum, and a fixed
    binary tree adds the parts, whatever the ranks. 1: one sum, and no tensor parallelism. It must divide the
    key-value heads, the MLP's width and the vocabulary.
    """

    @rule
    def _leaves_are_ours(self, run: PlannedRun) -> str | None:
        if self.leaves > 1 and run.config.sampler.startswith("vllm-"):
            reason = "vLLM's own model" if run.config.sampler == "vllm-exact" else "the decoder inside vLLM"
            return (
                f'precision.leaves ({self.leaves}) with sampler "{run.config.sampler}": {reason} sums in one '
                'part; set it to 1, or sampler = "native"'
            )
        if self.leaves > 1 and run.device == "cuda" and run.config.lora.rank:
            return (
                f"precision.leaves ({self.leaves}) with lora.rank ({run.config.lora.rank}): leaves of "
                'adapters are not built on a GPU; leave one out, or set device = "cpu"'
            )

    tiles: Literal["vllm-0.32", "vllm-0.33"] = "vllm-0.32"
    """The vLLM version whose tiles the matrix products use along the reduced dimension, on a GPU. These tiles
    decide the order of sums. With sampler = "vllm-exact" it must be the vLLM that samples.
    """

    @rule
    def _tiles_of_the_installed_vllm(self, run: PlannedRun) -> str | None:
        if (
            run.config.sampler == "vllm-exact"
            and run.vllm
            and minor_version(run.vllm) != minor_version(self.tiles)
        ):
            return (
                f'precision.tiles ("{self.tiles}"): vLLM {run.vllm} is installed, '
                "and has other tiles; set it to that version"
            )

    sampler_dtype: Annotated[Literal["", "float32", "bfloat16", "float16"], ShortNames] = setting(
        "", differs=True
    )
    """Compute dtype of the sampler; empty is the trainer's. Needs exact = false."""
    sampler_head_dtype: Annotated[Literal["", "compute", "float32"], ShortNames] = setting("", differs=True)
    """head_dtype of the sampler; empty is the trainer's. Needs exact = false."""
    sampler_cache_dtype: Annotated[Literal["", "compute", "bfloat16", "float16"], ShortNames] = setting(
        "", differs=True
    )
    """cache_dtype of the sampler; empty is the trainer's. Needs exact = false."""
    sampler_router_dtype: Annotated[Literal["", "compute", "float32"], ShortNames] = setting(
        "", head=WHERE_SET, differs=True, needs_experts=True
    )
    """router_dtype of the sampler; empty is the trainer's. Needs exact = false."""

    @rule
    def _numerics_of_our_sampler(self, run: PlannedRun) -> str | None:
        if run.external and self.of_sampler != self:
            return (
                f"precision.sampler_head_dtype, sampler_cache_dtype, sampler_router_dtype with sampler "
                f'"{run.config.sampler}": an engine as it comes has numerics of its own; leave them empty'
            )

    @field_validator("leaves")
    @classmethod
    def _halved(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError(f"{value} must be 1, 2, 4 or 8, because a binary tree adds the leaves")
        return value

    @field_validator("scale", "backoff", "minimum", "maximum")
    @classmethod
    def _power_of_two(cls, value: float) -> float:
        if value <= 0 or math.frexp(value)[0] != 0.5:
            raise ValueError(f"{value} must be a power of two, so that no bit of a weight depends on it")
        return value

    @property
    def sampler_differs(self) -> bool:
        """Whether a sampler_ key is set."""
        return differing(self)

    @property
    def quantisation(self) -> Quantisation | None:
        """How the weights that are computed with are quantised; None where they are not."""
        return Quantisation.parse(self.weights) if self.weights else None

    @property
    def of_sampler(self) -> "PrecisionConfig":
        """These settings with the sampler's dtypes of logits and cache in place of the trainer's."""
        return self.model_copy(
            update={
                "head_dtype": self.sampler_head_dtype or self.head_dtype,
                "cache_dtype": self.sampler_cache_dtype or self.cache_dtype,
                "router_dtype": self.sampler_router_dtype or self.router_dtype,
            }
        )
