"""The architecture of a supported checkpoint, read from config.json.

A field that asks for something unsupported is refused by name.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
            raw = json.loads(path.read_text())
        except FileNotFoundError:
            raise ValueError(
                f"model: {folder} holds no config.json; give a Hugging Face model folder or hub name"
            ) from None
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"model: {path} is not valid JSON ({error})") from None
        if not isinstance(raw, dict):
            raise ValueError(f"model: {path} must hold a JSON object")
        return cls.from_dict(raw, str(path))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], source: str = "config") -> "ModelConfig":
        """Build from the fields of config.json. `source` is what error messages call it.

        Raises ValueError and names the field that is missing or unsupported.
        """
        names = raw.get("architectures")
        name = str(names[0] if isinstance(names, list) and names else names or "(none)")
        if name not in ARCHITECTURES:
            raise ValueError(
                f"model: {source}: architecture {name} is not supported; "
                f"supported are {', '.join(ARCHITECTURES)}"
            )
        try:
            config = cls._parse(name, raw, source)
        except KeyError as error:
            raise ValueError(f"model: {source} lacks the field {error.args[0]}") from None
        except _UnsupportedError:
            raise
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"model: {source} has a field of the wrong type or value ({error})") from None
        config._check_sizes(source)
        return config

    @classmethod
    def _parse(cls, architecture: str, raw: dict[str, Any], source: str) -> "ModelConfig":
        """The fields of config.json, converted but with sizes unchecked."""
        _refuse(raw, source)
        family = ARCHITECTURES[architecture]
        theta, llama3 = _rope(raw, source)
        heads = int(raw["num_attention_heads"])
        return cls(
            architecture=architecture,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            layers=int(raw["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(
                raw.get("head_dim") or (128 if family == "qwen3" else int(raw["hidden_size"]) // heads)
            ),
            max_positions=int(raw["max_position_embeddings"]),
            eps=float(raw["rms_norm_eps"]),
            rope_theta=theta,
            rope_llama3=llama3,
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or bool(raw.get("attention_bias", False)),
            o_bias=family != "qwen2" and bool(raw.get("attention_bias", False)),
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
        if not (self.rope_theta > 0.0 and self.eps >= 0.0):
            raise ValueError(
                f"model: {source}: rope_theta ({self.rope_theta}) must be positive, "
                f"rms_norm_eps ({self.eps}) not negative"
            )
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
        raise _UnsupportedError(f"model: {source}: {field} = {value!r} is not supported; {remedy}")

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


def _rope(raw: dict[str, Any], source: str) -> tuple[float, dict[str, float] | None]:
    """RoPE theta, and the parameters of llama3 scaling where the model has it.

    transformers 5 writes `rope_parameters`; earlier versions write `rope_theta` and `rope_scaling`.
    """
    rope = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if rope.get("partial_rotary_factor", 1.0) not in (1.0, None):
        raise _UnsupportedError(
            f"model: {source}: partial_rotary_factor = {rope['partial_rotary_factor']!r} "
            "is not supported; only 1.0 is"
        )
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise _UnsupportedError(
            f"model: {source}: rope_type = {kind!r} is not supported; supported are default and llama3"
        )
    missing = [k for k in _ROPE_LLAMA3 if k not in rope]
    if missing:
        raise _UnsupportedError(f"model: {source}: rope_type llama3 lacks {', '.join(missing)}")
    return theta, {k: float(rope[k]) for k in _ROPE_LLAMA3}
