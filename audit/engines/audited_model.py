"""What an audit knows of a model's folder: its sizes, whichever library can compute with it.

zerokl's decoder knows some families. transformers loads many more. Of these an audit compares the columns,
the whole vocabulary and every module, and tries on a log what needs a forward alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...files.inputs import check_folder
from ...files.reading import read_json
from ...model.config import ModelConfig
from ...model.config_file import UnsupportedError
from ...model.families import FAMILIES

# Positions of a model whose config names no limit, such as one that recurs.
_UNLIMITED = 1 << 20
# Fields of a config.json that decide no number of the computation.
_NO_NUMBER = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")


@dataclass(frozen=True)
class AuditedModel:
    """The sizes of a model, and its config where zerokl has a decoder for it.

    refusal: why zerokl has none, as a sentence; empty where it has one.
    """

    folder: Path
    architecture: str
    vocab_size: int
    max_positions: int
    config: ModelConfig | None
    refusal: str = ""

    @property
    def experts(self) -> None:
        """zerokl does not know the routers of a model that it has no decoder of."""

    @property
    def raw(self) -> Mapping[str, Any]:
        """The fields of config.json that may decide a number."""
        fields = read_json(self.folder / "config.json")
        return {name: value for name, value in fields.items() if name not in _NO_NUMBER}


def audited_model(folder: Path, engines: Sequence[str]) -> AuditedModel:
    """The model of a folder, for some engines.

    Raises ValueError for a config that is missing or wrong, for a family that zerokl has no decoder of where
    one of the engines needs it, and for one that transformers cannot load either.
    """
    try:
        config = ModelConfig.from_file(folder)
        return AuditedModel(folder, config.architecture, config.vocab_size, config.max_positions, config)
    except ValueError as error:
        if not _is_of_another_family(folder, error):
            raise
        refusal = str(error)
    if needing := [name for name in engines if name not in ("hf", "hf-eager")]:
        raise ValueError(
            f"{refusal}. {' and '.join(dict.fromkeys(needing))} cannot compute with it; transformers may: "
            "--sampler hf --trainer hf"
        )
    return _of_transformers(folder, refusal)


def known_config(folder: Path) -> ModelConfig | None:
    """The config of a folder; None for a model that zerokl has no decoder of."""
    try:
        return ModelConfig.from_file(folder)
    except ValueError:
        return None


def _is_of_another_family(folder: Path, error: ValueError) -> bool:
    """Whether a refusal is about the family or a variant of it, and not about a file that is wrong."""
    if isinstance(error, UnsupportedError):
        return True
    try:
        names = read_json(folder / "config.json").get("architectures")
    except (OSError, ValueError, AttributeError):
        return False
    return isinstance(names, list) and bool(names) and isinstance(names[0], str) and names[0] not in FAMILIES


def _of_transformers(folder: Path, refusal: str) -> AuditedModel:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, __version__

    check_folder(folder)
    try:
        whole = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        config = whole.get_text_config()
        sizes = config.vocab_size, getattr(config, "max_position_embeddings", None) or _UNLIMITED
    except Exception as error:  # a config that a library does not know may raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"audit: transformers {__version__} cannot load {folder} ({reason}), and zerokl cannot either "
            f"({refusal}); install a transformers that knows this family"
        ) from None
    if type(whole) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"audit: transformers {__version__} has no causal language model for {folder} "
            f"(model_type {whole.model_type}), so no token has a log-probability; give one that has"
        )
    name = (whole.architectures or [type(whole).__name__])[0]
    return AuditedModel(folder, name, *sizes, None, refusal)
