"""config.json of a checkpoint: the fields that all families have, and what all of them refuse by name.

Nothing in the file is passed over: a key is read, or it is listed here as one that computes nothing, or the
file is refused by the key's name.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
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
    partial_rotary_factor: FiniteFloat | None = None
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

# Keys that decide no number of a forward or its gradient, whatever they hold: names and versions, tokens that
# a tokenizer or a sampler reads, outputs that a caller may ask for, what only a first initialisation or
# another loss reads, and choices of an implementation.
_COMPUTE_NOTHING = frozenset(
    """
    architectures model_type _name_or_path name_or_path transformers_version torch_dtype dtype auto_map
    tokenizer_class language transformers.js_config unsloth_fixed unsloth_version model_name
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id begin_suppress_tokens suppress_tokens
    bad_words_ids max_length min_length do_sample num_beams num_beam_groups diversity_penalty early_stopping
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size num_return_sequences remove_invalid_values exponential_decay_length_penalty
    use_cache output_attentions output_hidden_states output_scores output_router_logits return_dict
    return_dict_in_generate torchscript use_bfloat16 tf_legacy_loss pruned_heads tie_encoder_decoder
    id2label label2id num_labels problem_type finetuning_task task_specific_params prefix
    initializer_range router_aux_loss_coef router_z_loss_coef chunk_size_feed_forward
    aux_loss_alpha seq_aux ep_size
    cache_implementation
    attn_implementation _attn_implementation _attn_implementation_autoset _attn_implementation_internal
    experts_implementation _experts_implementation _experts_implementation_internal use_flash_attn
    """.split()  # noqa: SIM905 (a list would have a line for each)
)
# Keys of models of other kinds, each with the values that ask for nothing more than a decoder computes.
_OFF: dict[str, tuple[object, ...]] = {
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "attention_dropout": (0, None),
    "mlp_bias": (False, None),
    "pretraining_tp": (1, None),
    "moe_layer_freq": (1, None),
    "rope_interleaved": (False,),
    "is_llama_config": (True, False),
    "use_mrope": (False,),
}
# Activation -> an older name of it, where a family has it.
_OLDER_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu"}


class _Looked(dict[str, Any]):
    """The keys of a file and their values. It knows which of the keys were asked for."""

    def __init__(self, raw: Mapping[str, Any]):
        super().__init__(raw)
        self.looked_at: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.looked_at.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.looked_at.add(name)
        return super().get(name, default)


@dataclass(frozen=True)
class ConfigFile:
    """The fields of a config.json. source: what error messages call it.

    defaults: what the family takes where the file lacks a key. A key that is null has the default of Fields.
    """

    raw: "_Looked"
    source: str = "config"
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        # Each reader of a file asks anew.
        object.__setattr__(self, "raw", _Looked(self.raw))

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
        raw = self.defaults | self.raw if raw is None else raw
        self.raw.looked_at.update(kind.model_fields)
        try:
            return kind.model_validate({name: value for name, value in raw.items() if value is not None})
        except ValidationError as errors:
            error = errors.errors(include_url=False)[0]
        name = error["loc"][0]
        if error["type"] == "missing":
            raise UnsupportedError(f"model: {self.source} lacks the field {name}")
        self.wrong(f"{name} ({shown(raw[name])}) must be {_RULES[error['type'].split('_')[0]]}")

    def value(self, name: str) -> Any:
        """What the file holds under a key, or the family's default; None where there is neither."""
        return self.raw.get(name, self.defaults.get(name))

    def wrong(self, what: str) -> NoReturn:
        """Raise UnsupportedError for what is wrong in the file."""
        raise UnsupportedError(f"model: {self.source}: {what}")

    def refuse(self, field: str, value: object, remedy: str) -> NoReturn:
        """Raise UnsupportedError for the value of a field, which asks for what no block computes."""
        self.wrong(f"{field} = {shown(value)} is not supported; {remedy}")

    def refuse_common(self, layer_types: Collection[str], dequantised: str = "") -> None:
        """Refuse what changes the computation of any family in a way the kernels do not know.

        layer_types: those that the family knows. dequantised: the kind of quantised weights that it reads.
        """
        raw = self.raw
        if raw.get("quantization_config"):
            method = raw["quantization_config"].get("quant_method", "?")
            if method != dequantised:
                self.refuse("quantization_config", method, "use unquantised weights")
        allowed = self.defaults.get("hidden_act", "silu")
        activation = raw.get("hidden_act", allowed)
        if activation not in (allowed, _OLDER_ACTIVATIONS.get(allowed)):
            self.refuse("hidden_act", activation, f"only {allowed} is")
        if "use_sliding_window" in self.defaults | raw:  # then it governs these two
            raw.looked_at.update({"sliding_window", "max_window_layers"})
        types = set(raw.get("layer_types") or [])
        if raw.get("use_sliding_window") or "sliding_attention" in types - set(layer_types):
            self.refuse("sliding window attention", raw.get("sliding_window"), "only full attention is")
        if types - set(layer_types):
            self.refuse("layer_types", sorted(types), f"only {' and '.join(sorted(layer_types))} is")
        if raw.get("attention_dropout"):
            self.refuse(
                "attention_dropout",
                raw["attention_dropout"],
                "the policy that is trained must be the policy that was sampled: set it to 0",
            )

    def refuse_unknown(self) -> None:
        """Refuse a key that nobody has asked for, and that may change the computation.

        Call it when everything has been read.
        """
        known = self.raw.looked_at | _COMPUTE_NOTHING
        for key, value in self.raw.items():
            # What begins with "_" is a note of a library to itself.
            if key in known or key.startswith("_") or value is None or (key in _OFF and value in _OFF[key]):
                continue
            what = "it may change what the model computes"
            if key in _OFF:
                what = f"only {_OFF[key][0]} is"
            self.refuse(key, value, f"{what}; where it computes nothing, remove it from the file")
