"""Reads a configuration from a TOML file or preset with overrides, and writes it. Unknown keys are errors.

`zerokl train` parses its command line into the models of run_config.py (see cli/). It passes the settings
given there as overrides, so that everything is checked once, here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from ...files.reading import read_toml, shown
from ...kernels.sampling_params import PENALTIES, WHY_NO_PENALTY
from .compatibility import check_settings
from .key_hints import hint
from .lora_section import REFUSED, refusal
from .run_config import FREE_SECTIONS, Config
from .section import settings_of

# The configurations that come with zerokl.
PRESETS = Path(__file__).parent / "presets"
# What is said beside a dtype of 8 or 4 bits.
_NARROW = (
    "; in 8 bits zerokl has weights (precision.weights of train, or perturb.weights for the sampler alone) "
    "and keys and values (precision.kv, perturb.kv)"
)
# Characters of an unknown key that a message shows.
_KEY = 100


def load_config(
    file: str | None = None, preset: str | None = None, overrides: Mapping[str, Any] | None = None
) -> Config:
    """The configuration of a TOML file or a preset, with overrides by dotted key: {"optimizer.lr": 3e-4}.

    An override of loss.preset, task.name or model takes the place of what the file chose for the old name.

    Raises ValueError, with a message of one line, for a file that cannot be read, an unknown key (the message
    names the nearest known key), a bad value, or settings that do not go together.
    """
    return load_with_left(file, preset, overrides)[0]


def load_with_left(
    file: str | None, preset: str | None, overrides: Mapping[str, Any] | None
) -> tuple[Config, dict[str, Any]]:
    """What load_config returns, and the settings of the file or preset that do not count beside overrides.

    They were chosen for a name that an override replaces (Facts.replaces).
    """
    values = _read(file, preset)
    left = _left_behind(values, overrides or {})
    for key in left:
        _drop(values, key)
    for key, value in (overrides or {}).items():
        check_key(key)
        _put(values, key, value)
    for key, _ in _items(values):
        check_key(key)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ValueError(validation_message(error)) from None
    check_settings(config)
    return config, left


def file_keys(file: str) -> set[str]:
    """The dotted keys that a TOML file sets, sections included. Raises ValueError."""
    return {key for key, _ in _items(_read(file, None))}


def validation_message(error: ValidationError) -> str:
    """The first error that pydantic found, in one line: key, value and rule."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    rule = first["msg"].removeprefix("Value error, ")
    if first["type"] == "model_type" and key:
        return _not_a_section(key, first["input"])
    if not key:
        return f"config: {rule}"
    value = "" if isinstance(first["input"], dict) else f" ({shown(first['input'])})"
    narrow = key.endswith("dtype") and re.match(r"\w*?(fp|float|int)[48]", str(first["input"]))
    return f"config: {key}{value}: {rule}{_NARROW if narrow else ''}"


def _not_a_section(key: str, value: Any) -> str:
    """The message about a section that was given a value."""
    settings = [k for k in known_keys() if k.startswith(f"{key}.")]
    chooses = next((k for k in (f"{key}.preset", f"{key}.name") if k in settings), None)
    meant = f"did you mean {chooses}?" if chooses else f"its settings are {', '.join(settings)}"
    return f"config: {key} ({shown(value)}) is a section; {meant}"


def preset_names() -> list[str]:
    """The presets that come with zerokl."""
    return sorted(file.stem for file in PRESETS.glob("*.toml"))


def _read(file: str | None, preset: str | None) -> dict[str, Any]:
    """The values in a file or a preset; nothing without either. Raises ValueError."""
    if file is not None and preset is not None:
        raise ValueError("config: give a file or --preset, not both")
    if preset is not None:
        if preset not in preset_names():
            raise ValueError(f"config: preset {preset} is not known; choose {', '.join(preset_names())}")
        return read_toml(PRESETS / f"{preset}.toml")
    if file is None:
        return {}
    try:
        values = read_toml(Path(file), stream=True)
    except OSError as error:
        raise ValueError(f"config: {file} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"config: {file} {error}") from None
    if not values:
        raise ValueError(
            f"config: {file} sets no key; a file must set one, and without a file all are default"
        )
    return values


def _left_behind(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in `values` that were chosen for a name which an override replaces, by dotted key."""
    chosen = {k: v for k, v in _items(values) if k in FREE_SECTIONS or not isinstance(v, Mapping)}
    left: dict[str, Any] = {}
    for name, setting in settings_of(Config).items():
        facts = setting.facts
        if facts.replaces and name in overrides:
            another = chosen.get(name, overrides[name]) != overrides[name]
            if another or facts.replaces_same:
                left |= {k: v for k, v in chosen.items() if k.startswith(facts.replaces) and k != name}
    return left


def _drop(values: dict[str, Any], key: str) -> None:
    """Take a dotted key out of nested tables."""
    *path, last = key.split(".")
    for part in path:
        values = values[part]
    del values[last]


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested tables. Raises ValueError where a part of the key is not a table."""
    *path, last = key.split(".")
    table = values
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ValueError(f"config: {key}: {part} is {shown(table)}, not a section")
    table[last] = value


@cache
def known_keys() -> tuple[str, ...]:
    """Every dotted key of the configuration, sections included."""
    keys = [name for key in settings_of(Config) for name in (key.rpartition(".")[0], key) if name]
    return tuple(dict.fromkeys(keys))


def _items(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key in nested tables, sections included, with its value."""
    for name, value in values.items():
        yield prefix + name, value
        if isinstance(value, Mapping) and prefix + name not in FREE_SECTIONS:
            yield from _items(value, f"{prefix}{name}.")


def check_key(key: str, options: Sequence[str] = ()) -> None:
    """Raise ValueError for an unknown key. The message says which one was probably meant.

    options: what the command takes beside the keys, without dashes.
    """
    known = known_keys()
    if key in known or key.startswith(tuple(f"{section}." for section in FREE_SECTIONS)):
        return
    if key.rpartition(".")[2] in PENALTIES:
        raise ValueError(f"config: {key} is refused: {WHY_NO_PENALTY}")
    if key.startswith("lora.") and (name := key.removeprefix("lora.")) in REFUSED:
        raise ValueError(f"config: {refusal(name)}")
    if key == "config":
        raise ValueError("config: the file is given without an option: zerokl train FILE --run_dir DIR")
    raise ValueError(f"config: unknown key {key[:_KEY]}{hint(key, known, options)}")


def to_toml(config: Config) -> str:
    """The whole configuration as TOML. What is None is left out."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))
