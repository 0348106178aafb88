"""config.json of a checkpoint: the fields that all families have, and what all of them refuse by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, PositiveInt, ValidationError

from ..files.reading import read_json, shown

# A larger number of layers is a mistake; see sizes.py.
_MOST_LAYERS = 1 << 12


class UnsupportedError(ValueError):
    """A field names something that the kernels do not know. The message is complete."""


class Fields(BaseModel):
    """Fields of a JSON object. Nothing is converted; a field that is not listed is not looked at.

    One that is missing or null has its default, if it has one. Any other value counts: 0 is not "not given".
    """

    model_config = ConfigDict(strict=True, extra="ignore")


class CommonFields(Fields):
    """The fields that all families have."""

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
_FieldsT = TypeVar("_FieldsT", bound=Fields)


@dataclass(frozen=True)
class ConfigFile:
    """The fields of a config.json. source: what error messages call it."""

    raw: dict[str, Any]
    source: str = "config"

    @classmethod
    def of_folder(cls, folder: str | Path) -> "ConfigFile":
        """folder/config.json. Raises ValueError when it is missing, or is no JSON object."""
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
        return cls(raw, str(path))

    @property
    def architecture(self) -> Any:
        """The name of the model's class, whatever stands there."""
        names = self.raw.get("architectures")
        return names[0] if isinstance(names, list) and names else names

    @cached_property
    def fields(self) -> CommonFields:
        """The fields that all families have. Raises UnsupportedError."""
        return self.read(CommonFields)

    def read(self, kind: type[_FieldsT], raw: Mapping[str, Any] | None = None) -> _FieldsT:
        """The fields of a kind, of the file or of an object in it. Raises UnsupportedError."""
        raw = self.raw if raw is None else raw
        try:
            return kind.model_validate({name: value for name, value in raw.items() if value is not None})
        except ValidationError as errors:
            error = errors.errors(include_url=False)[0]
        name = error["loc"][0]
        if error["type"] == "missing":
            raise UnsupportedError(f"model: {self.source} lacks the field {name}")
        self.wrong(f"{name} ({shown(raw[name])}) must be {_RULES[error['type'].split('_')[0]]}")

    def wrong(self, what: str) -> NoReturn:
        """Raise UnsupportedError for what is wrong in the file."""
        raise UnsupportedError(f"model: {self.source}: {what}")

    def refuse(self, field: str, value: object, remedy: str) -> NoReturn:
        """Raise UnsupportedError for the value of a field, which asks for what no block computes."""
        self.wrong(f"{field} = {shown(value)} is not supported; {remedy}")

    def refuse_common(self) -> None:
        """Refuse what changes the computation of any family in a way the kernels do not know."""
        raw = self.raw
        if raw.get("quantization_config"):
            method = raw["quantization_config"].get("quant_method", "?")
            self.refuse("quantization_config", method, "use unquantised weights")
        if raw.get("hidden_act", "silu") != "silu":
            self.refuse("hidden_act", raw["hidden_act"], "only silu is")
        if raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or []):
            self.refuse("sliding window attention", raw.get("sliding_window"), "only full attention is")
        if set(raw.get("layer_types") or []) - {"full_attention"}:
            self.refuse("layer_types", sorted(set(raw["layer_types"])), "only full_attention is")
        if raw.get("mlp_bias"):
            self.refuse("mlp_bias", True, "only MLPs without bias are")
        if raw.get("pretraining_tp", 1) not in (1, None):
            self.refuse("pretraining_tp", raw["pretraining_tp"], "only 1 is")
        if raw.get("partial_rotary_factor", 1.0) not in (1.0, None):
            self.refuse("partial_rotary_factor", raw["partial_rotary_factor"], "only 1.0 is")
        if raw.get("attention_dropout"):
            self.refuse(
                "attention_dropout",
                raw["attention_dropout"],
                "the policy that is trained must be the policy that was sampled: set it to 0",
            )
