"""The architecture of a supported checkpoint, read from config.json.

A field that asks for something unsupported is refused by name.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..files.reading import read_json, shown
from ..kernels.rope import llama3_frequencies, rope_frequencies

ARCHITECTURES = {"Qwen3ForCausalLM": "qwen3", "Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}
_ROPE_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "layers",
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
    raw: dict[str, Any] = dataclasses.field(repr=False, compare=False)  # config.json as read

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
        fields = _Fields(raw, source)
        family = ARCHITECTURES[architecture]
        theta, llama3 = _rope(fields)
        hidden_size, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
        bias = fields.flag("attention_bias")
        return cls(
            architecture=architecture,
            vocab_size=fields.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.size("intermediate_size"),
            layers=fields.size("num_hidden_layers"),
            heads=heads,
            kv_heads=fields.size("num_key_value_heads", heads),
            head_dim=fields.size("head_dim", 128 if family == "qwen3" else hidden_size // heads),
            max_positions=fields.size("max_position_embeddings"),
            eps=fields.number("rms_norm_eps"),
            rope_theta=theta,
            rope_llama3=llama3,
            tied=fields.flag("tie_word_embeddings"),
            qkv_bias=family == "qwen2" or bias,
            o_bias=family != "qwen2" and bias,
            qk_norm=family == "qwen3",
            raw=raw,
        )

    def _check_sizes(self, source: str) -> None:
        """Raise ValueError for a number that no model can have, or that the kernels cannot take."""
        for field in _SIZES:
            value, largest = getattr(self, field), _MOST_LAYERS if field == "layers" else _LARGEST
            if value < 1:
                raise ValueError(f"model: {source}: {field} ({value}) must be positive")
            if value > largest:
                raise ValueError(
                    f"model: {source}: {field} ({value}) is larger than zerokl takes ({largest})"
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


class _Fields:
    """The fields of config.json by type. A field that is missing or null has its default, if it has one.

    Any other value counts: 0 is not "not given". Raises _UnsupportedError that names the field.
    """

    def __init__(self, raw: Mapping[str, Any], source: str):
        self.raw, self.source = raw, source

    def fail(self, problem: str) -> NoReturn:
        """Raise _UnsupportedError."""
        raise _UnsupportedError(f"model: {self.source}{problem}")

    def _given(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        if value is None and default is None:
            self.fail(f" lacks the field {name}")
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self._given(name, default)
        if type(value) is not int or value < 1:
            self.fail(f": {name} ({shown(value)}) must be a positive whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._given(name, default)
        # A whole number of thousands of digits is no fp64 number.
        if type(value) not in (int, float) or not abs(value) < 1 << 1000 or not math.isfinite(value):
            self.fail(f": {name} ({shown(value)}) must be a finite number")
        return float(value)

    def flag(self, name: str) -> bool:
        """true or false; false where it is missing."""
        value = self._given(name, False)
        if type(value) is not bool:
            self.fail(f": {name} ({shown(value)}) must be true or false")
        return value

    def table(self, name: str) -> dict[str, Any]:
        """An object; empty where it is missing."""
        value = self._given(name, {})
        if not isinstance(value, dict):
            self.fail(f": {name} ({shown(value)}) must be an object")
        return value


def _rope(fields: _Fields) -> tuple[float, dict[str, float] | None]:
    """RoPE theta, and the parameters of llama3 scaling where the model has it.

    transformers 5 writes `rope_parameters`; earlier versions write `rope_theta` and `rope_scaling`.
    """
    rope = _Fields(fields.table("rope_scaling") | fields.table("rope_parameters"), fields.source)
    kinds = [rope.raw[name] for name in ("rope_type", "type") if rope.raw.get(name) is not None]
    kind = kinds[0] if kinds else "default"
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    if rope.raw.get("partial_rotary_factor", 1.0) not in (1.0, None):
        factor = shown(rope.raw["partial_rotary_factor"])
        fields.fail(f": partial_rotary_factor = {factor} is not supported; only 1.0 is")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        fields.fail(f": rope_type = {shown(kind)} is not supported; supported are default and llama3")
    values = {name: rope.number(name) for name in _ROPE_LLAMA3}
    if min(values.values()) <= 0.0 or values["low_freq_factor"] >= values["high_freq_factor"]:
        fields.fail(
            f": rope_type llama3: {', '.join(_ROPE_LLAMA3)} must be positive, "
            "and low_freq_factor below high_freq_factor"
        )
    return theta, values
