"""The architecture of a supported checkpoint, read from config.json.

A field that asks for something unsupported is refused by name.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, PositiveInt, ValidationError

from ..files.reading import read_json, shown
from ..kernels.rope import llama3_frequencies, rope_frequencies

# Architecture -> its family.
ARCHITECTURES = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen2ForCausalLM": "qwen2",
    "LlamaForCausalLM": "llama",
}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "heads",
    "kv_heads",
    "head_dim",
    "max_positions",
)
# Upper limits of these sizes. A larger size is a mistake, and the mistake would take all time or memory
# before anybody sees it.
_LARGEST, _MOST_LAYERS = 1 << 24, 1 << 12
# With a base below 1 the frequencies would rise, and fp32 does not hold those of a larger one.
_ROPE_THETA = (1.0, 1e15)


@dataclass(frozen=True)
class Experts:
    """The mixture of experts of a sparse layer."""

    number: int
    per_token: int
    size: int  # intermediate size of one expert
    renormalise: bool  # whether the routing weights of a token are divided by their sum
    layers: frozenset[int]  # the sparse layers; the others have one MLP

    def as_json(self) -> dict[str, Any]:
        """The fields by name, as JSON holds them."""
        return vars(self) | {"layers": sorted(self.layers)}


@dataclass(frozen=True)
class ModelConfig:
    """Static dimensions of a decoder. Widths in elements, positions in tokens."""

    architecture: str  # a key of ARCHITECTURES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    eps: float
    rope_theta: float
    rope_llama3: dict[str, float] | None
    tied: bool  # lm_head shares the embedding's weight
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool  # RMSNorm over each query and key head (Qwen3)
    experts: Experts | None  # None: every layer has one MLP
    raw: dict[str, Any] = dataclasses.field(repr=False, compare=False)  # config.json as read

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts in place of one MLP."""
        return self.experts is not None and layer in self.experts.layers

    @property
    def frequencies(self) -> list[float]:
        """Inverse RoPE frequencies, radians per position, [head_dim / 2]."""
        base = rope_frequencies(self.head_dim, self.rope_theta)
        if self.rope_llama3 is None:
            return base
        scaling = self.rope_llama3
        return llama3_frequencies(
            base,
            scaling["factor"],
            scaling["low_freq_factor"],
            scaling["high_freq_factor"],
            int(scaling["original_max_position_embeddings"]),
        )

    @classmethod
    def from_file(cls, folder: str | Path) -> "ModelConfig":
        """Read folder/config.json.

        Raises ValueError when the file is missing, is not JSON or names something unsupported.
        """
        path = Path(folder) / "config.json"
        try:
            raw = read_json(path)
        except FileNotFoundError:
            raise ValueError(
                f"model: {folder} holds no config.json; give a Hugging Face model folder or hub name"
            ) from None
        except ValueError as error:
            raise ValueError(f"model: {path} {error}") from None
        if not isinstance(raw, dict):
            raise ValueError(f"model: {path} must hold a JSON object")
        return cls.from_dict(raw, str(path))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], source: str = "config") -> "ModelConfig":
        """Build from the fields of config.json. `source` is what error messages call it.

        Raises ValueError and names the field that is missing or unsupported.
        """
        names = raw.get("architectures")
        name = names[0] if isinstance(names, list) and names else names
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise ValueError(
                f"model: {source}: architecture {shown(name)} is not supported; "
                f"supported are {', '.join(ARCHITECTURES)}"
            )
        try:
            config = cls._parse(name, raw, source)
        except _UnsupportedError:
            raise
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"model: {source} has a field of the wrong type ({error})") from None
        config._check_sizes(source)
        return config

    @classmethod
    def _parse(cls, architecture: str, raw: dict[str, Any], source: str) -> "ModelConfig":
        """The fields of config.json, converted but with sizes unchecked."""
        _refuse(raw, source)
        fields = _read(_ConfigFields, raw, source)
        family = ARCHITECTURES[architecture]
        theta, llama3 = _rope(fields, source)
        heads, bias = fields.num_attention_heads, fields.attention_bias
        return cls(
            architecture=architecture,
            vocab_size=fields.vocab_size,
            hidden_size=fields.hidden_size,
            intermediate_size=fields.intermediate_size,
            layers=fields.num_hidden_layers,
            heads=heads,
            kv_heads=fields.num_key_value_heads or heads,
            head_dim=fields.head_dim or (128 if family == "qwen3" else fields.hidden_size // heads),
            max_positions=fields.max_position_embeddings,
            eps=fields.rms_norm_eps,
            rope_theta=theta,
            rope_llama3=llama3,
            tied=fields.tie_word_embeddings,
            qkv_bias=family == "qwen2" or bias,
            o_bias=family != "qwen2" and bias,
            qk_norm=family in ("qwen3", "qwen3_moe"),
            experts=_experts(raw, fields.num_hidden_layers, source) if family == "qwen3_moe" else None,
            raw=raw,
        )

    def _check_sizes(self, source: str) -> None:
        """Raise ValueError for a number that no model can have, or that the kernels cannot take."""
        for field in _SIZES:
            value = getattr(self, field)
            if value < 1:
                raise ValueError(f"model: {source}: {field} ({value}) must be positive")
            if value > _LARGEST:
                raise ValueError(
                    f"model: {source}: {field} ({value}) is larger than zerokl takes ({_LARGEST})"
                )
        low, high = _ROPE_THETA
        if not low <= self.rope_theta <= high:
            raise ValueError(
                f"model: {source}: rope_theta ({self.rope_theta}) must lie in {low:g} to {high:g}"
            )
        if not self.eps >= 0.0:
            raise ValueError(f"model: {source}: rms_norm_eps ({self.eps}) must not be negative")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model: {source}: num_attention_heads ({self.heads}) "
                f"must be a multiple of num_key_value_heads ({self.kv_heads})"
            )
        if self.head_dim % 16:
            raise ValueError(f"model: {source}: head_dim ({self.head_dim}) must be a multiple of 16")


class _UnsupportedError(ValueError):
    """A field names something that the kernels do not know. The message is complete."""


def _refuse(raw: dict[str, Any], source: str) -> None:
    """Raise ValueError for a field whose value changes the computation in a way the kernels do not know."""

    def no(field: str, value: object, remedy: str) -> None:
        raise _UnsupportedError(f"model: {source}: {field} = {shown(value)} is not supported; {remedy}")

    if raw.get("quantization_config"):
        no(
            "quantization_config",
            raw["quantization_config"].get("quant_method", "?"),
            "use unquantised weights",
        )
    if raw.get("hidden_act", "silu") != "silu":
        no("hidden_act", raw["hidden_act"], "only silu is")
    if raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or []):
        no("sliding window attention", raw.get("sliding_window"), "only full attention is")
    if set(raw.get("layer_types") or []) - {"full_attention"}:
        no("layer_types", sorted(set(raw["layer_types"])), "only full_attention is")
    if raw.get("mlp_bias"):
        no("mlp_bias", True, "only MLPs without bias are")
    if raw.get("pretraining_tp", 1) not in (1, None):
        no("pretraining_tp", raw["pretraining_tp"], "only 1 is")
    if raw.get("partial_rotary_factor", 1.0) not in (1.0, None):
        no("partial_rotary_factor", raw["partial_rotary_factor"], "only 1.0 is")
    if raw.get("attention_dropout"):
        no(
            "attention_dropout",
            raw["attention_dropout"],
            "the policy that is trained must be the policy that was sampled: set it to 0",
        )


class _Strict(BaseModel):
    """Fields of a JSON object. Nothing is converted; a field that is not listed is not looked at."""

    model_config = ConfigDict(strict=True, extra="ignore")


class _ConfigFields(_Strict):
    """The fields of config.json. One that is missing or null has its default, if it has one.

    Any other value counts: 0 is not "not given".
    """

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: int = Field(gt=0, le=_MOST_LAYERS)
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    max_position_embeddings: PositiveInt
    rms_norm_eps: FiniteFloat
    rope_theta: FiniteFloat = 10000.0
    rope_scaling: dict[str, Any] = {}
    rope_parameters: dict[str, Any] = {}
    tie_word_embeddings: bool = False
    attention_bias: bool = False


class _ExpertFields(_Strict):
    """The fields of a mixture of experts. transformers 5 writes num_local_experts for num_experts."""

    num_experts: PositiveInt
    num_experts_per_tok: PositiveInt
    moe_intermediate_size: PositiveInt
    norm_topk_prob: bool = False
    decoder_sparse_step: PositiveInt = 1
    mlp_only_layers: list[int] = []


class _RopeFields(_Strict):
    """The fields of `rope_parameters` or `rope_scaling`."""

    rope_type: Any = None
    type: Any = None  # the older name of rope_type
    rope_theta: FiniteFloat | None = None
    partial_rotary_factor: Any = 1.0


class _Llama3Fields(_Strict):
    """The fields of rope_type llama3."""

    factor: FiniteFloat
    low_freq_factor: FiniteFloat
    high_freq_factor: FiniteFloat
    original_max_position_embeddings: FiniteFloat


# The beginning of the name that pydantic gives to an error -> what the field must be.
_RULES = {
    "int": "a positive whole number",
    "greater": "a positive whole number",
    "less": f"at most {_MOST_LAYERS}, the layers that zerokl takes",
    "float": "a finite number",
    "finite": "a finite number",
    "bool": "true or false",
    "dict": "an object",
    "list": "a list",
}
_FieldsT = TypeVar("_FieldsT", bound=_Strict)


def _read(kind: type[_FieldsT], raw: Mapping[str, Any], source: str) -> _FieldsT:
    """The fields of a JSON object. Raises _UnsupportedError, which names the first wrong field."""
    try:
        return kind.model_validate({name: value for name, value in raw.items() if value is not None})
    except ValidationError as errors:
        error = errors.errors(include_url=False)[0]
    name = error["loc"][0]
    if error["type"] == "missing":
        raise _UnsupportedError(f"model: {source} lacks the field {name}")
    rule = _RULES[error["type"].split("_")[0]]
    raise _UnsupportedError(f"model: {source}: {name} ({shown(raw[name])}) must be {rule}")


# Fields of other mixtures of experts, each with the values that ask for nothing more than ours computes.
_OTHER_EXPERTS: dict[str, tuple[object, ...]] = {
    "shared_expert_intermediate_size": (0,),
    "n_shared_experts": (0,),
    "num_shared_experts": (0,),
    "scoring_func": ("softmax",),
    "topk_method": ("greedy",),
    "n_group": (1,),
    "topk_group": (1,),
    "routed_scaling_factor": (1.0,),
    "moe_router_use_sigmoid": (False,),
    "use_routing_bias": (False,),
    "router_jitter_noise": (0.0,),
}
# Of a layer, and of all layers together. Every matrix of an expert has a name and a place.
_MOST_EXPERTS, _MOST_OF_ALL_LAYERS = 1 << 12, 1 << 17


def _experts(raw: Mapping[str, Any], layers: int, source: str) -> Experts:
    """The experts of a Qwen3-MoE. Raises ValueError for experts that are shared and for another router."""
    for field, values in _OTHER_EXPERTS.items():
        if raw.get(field) is not None and raw[field] not in values:
            raise _UnsupportedError(
                f"model: {source}: {field} = {shown(raw[field])} is not supported; only experts that a "
                "softmax chooses for each token are, without shared ones"
            )
    named = {"num_experts": raw.get("num_local_experts")}
    fields = _read(_ExpertFields, named | {k: v for k, v in raw.items() if v is not None}, source)
    number, per_token = fields.num_experts, fields.num_experts_per_tok
    if per_token > number or number > _MOST_EXPERTS:
        raise _UnsupportedError(
            f"model: {source}: num_experts_per_tok ({per_token}) must be at most num_experts ({number}), and "
            f"num_experts at most {_MOST_EXPERTS}"
        )
    step, dense = fields.decoder_sparse_step, set(fields.mlp_only_layers)
    sparse = frozenset(i for i in range(layers) if (i + 1) % step == 0 and i not in dense)
    if number * len(sparse) > _MOST_OF_ALL_LAYERS:
        raise _UnsupportedError(
            f"model: {source}: num_experts ({number}) in {len(sparse)} layers are more than zerokl takes "
            f"({_MOST_OF_ALL_LAYERS})"
        )
    return Experts(number, per_token, fields.moe_intermediate_size, fields.norm_topk_prob, sparse)


def _rope(fields: _ConfigFields, source: str) -> tuple[float, dict[str, float] | None]:
    """RoPE theta, and the parameters of llama3 scaling where the model has it.

    transformers 5 writes `rope_parameters`; earlier versions write `rope_theta` and `rope_scaling`.
    """
    raw = fields.rope_parameters or fields.rope_scaling
    if raw | fields.rope_scaling != raw:
        raise _UnsupportedError(
            f"model: {source}: rope_scaling ({shown(fields.rope_scaling)}) differs from rope_parameters, and "
            "libraries differ in which they read; keep one"
        )
    rope = _read(_RopeFields, raw, source)
    kinds = [kind for kind in (rope.rope_type, rope.type) if kind is not None]
    kind = kinds[0] if kinds else "default"
    theta = fields.rope_theta if rope.rope_theta is None else rope.rope_theta
    if rope.partial_rotary_factor != 1.0:
        factor = shown(rope.partial_rotary_factor)
        raise _UnsupportedError(
            f"model: {source}: partial_rotary_factor = {factor} is not supported; only 1.0 is"
        )
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise _UnsupportedError(
            f"model: {source}: rope_type = {shown(kind)} is not supported; supported are default and llama3"
        )
    values = _read(_Llama3Fields, raw, source).model_dump()
    if min(values.values()) <= 0.0 or values["low_freq_factor"] >= values["high_freq_factor"]:
        raise _UnsupportedError(
            f"model: {source}: rope_type llama3: {', '.join(values)} must be positive, "
            "and low_freq_factor below high_freq_factor"
        )
    return theta, values
