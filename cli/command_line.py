"""What was typed at the command line: settings by dotted key, TOML values, and errors in one line."""

import json
import traceback
from collections.abc import Sequence
from pathlib import Path
from platform import python_version
from typing import Any

import cyclopts
from pydantic import BaseModel, ValidationError

from ..engine.config.config_file import check_key, known_keys, validation_message
from ..engine.config.precision_section import full_dtype
from ..engine.config.run_config import FREE_SECTIONS, Config
from ..files.installed import has_trainer, installed_version, needs_trainer
from ..files.reading import one_line, parse_toml, read_toml
from ..files.writing import os_error_line
from ..kernels.sampling_params import PENALTIES, WHY_NO_PENALTY

# What libraries say in errors of other classes when the machine gives them no memory: torch's allocator on
# CPU and GPU, a thread's stack, and the loader of a shared library.
_NO_MEMORY = (
    "can't allocate memory",
    "out of memory",
    "can't start new thread",
    "failed to map segment from shared object",
    "could not create a primitive",  # oneDNN
)


# The commands around a run, as help lists them: in the order in which most people come to use them.
RUN_COMMANDS = "train watch report eval sample verify replay diff attest ablate init merge weights variants"
OF_THE_TRAINER = {*RUN_COMMANDS.split()} - {"diff"}  # that zerokl has, and zerokl-audit does not
# Options that have another name now, by the command that takes them.
_RENAMED = {"audit": {"own": "batch_invariance", "full": "full_vocab"}}


def given_settings(settings: Config) -> dict[str, Any]:
    """The settings that are given on the command line, by dotted key."""
    given: dict[str, Any] = {}

    def walk(section: BaseModel, prefix: str) -> None:
        for name in section.model_fields_set:
            key, value = prefix + name, getattr(section, name)
            if isinstance(value, BaseModel):
                walk(value, f"{key}.")
            elif key in FREE_SECTIONS:
                given.update({f"{key}.{option}": _toml_value(word) for option, word in value.items()})
            else:
                given[key] = value

    walk(settings, "")
    return given


def version_line() -> str:
    """The version of zerokl, and those of what decides bits beside it. Nothing is loaded for it."""
    names = ("torch", "triton", "transformers", "vllm")
    others = [f"{name} {version}" for name in names if (version := installed_version(name))]
    package = "zerokl" if has_trainer() else "zerokl-audit"
    versions = ", ".join([f"Python {python_version()}", *others])
    return f"{package} {installed_version(package) or _source_version()} ({versions})"


def _source_version() -> str:
    """The version of a source tree that is used without being installed."""
    return read_toml(Path(__file__).parents[1] / "pyproject.toml")["project"]["version"]


def toml_values(options: dict[str, str] | None) -> dict[str, Any]:
    """A task's options with their values (see _toml_value)."""
    return {name: _toml_value(word) for name, word in (options or {}).items()}


def _toml_value(word: Any) -> Any:
    """A word of the command line as a TOML value, or the word itself where it is not valid TOML."""
    try:
        return parse_toml(f"x = {word}")["x"] if isinstance(word, str) else word
    except ValueError:
        return word


def spelt_out(words: Sequence[str]) -> list[str]:
    """The words of a command line in the forms that the parser takes.

    --key true and --key false become --key=true and --key=false, the only form with a value for a flag.
    The value of an option that names a dtype becomes the full name: --dtype bf16 is --dtype bfloat16.
    --task.options "{ a = 1 }" becomes --task.options.a=1.
    """
    result: list[str] = []
    for word in words:
        option = result[-1] if result and result[-1].startswith("--") and "=" not in result[-1] else ""
        if option and word in ("true", "false"):
            result[-1] += f"={word}"
        elif _names_dtype(option or word):
            name, equals, value = word.rpartition("=")
            result.append(name + equals + full_dtype(value))
        elif option.removeprefix("--") in FREE_SECTIONS and isinstance(table := _toml_value(word), dict):
            result[-1:] = [f"{option}.{name}={json.dumps(value)}" for name, value in table.items()]
        else:
            result.append(word)
    return result


def _names_dtype(option: str) -> bool:
    """Whether the value of an option, --key or --key=value, is a dtype."""
    name = option.partition("=")[0].replace("-", "_")
    return name.startswith("__") and name.endswith(("dtype", "round_weights"))


def error_message(error: cyclopts.CycloptsError) -> str:
    """What is wrong with the command line, in one line. Raises ValueError for an unknown setting."""
    command = error.command_chain[-1] if error.command_chain else ""
    if isinstance(error, cyclopts.UnknownCommandError) and error.unused_tokens[0] in OF_THE_TRAINER:
        needs_trainer(error.unused_tokens[0])
    if isinstance(error, cyclopts.UnknownOptionError):
        option = (error.token.keyword or error.token.value).partition("=")[0]
        option = option.removeprefix("--").replace("-", "_")
        if new_name := _RENAMED.get(command, {}).get(option):
            return f"{command}: --{option} is called --{new_name} now"
        if option in PENALTIES:
            return f"{command}: --{option} is refused: {WHY_NO_PENALTY}"
        if _takes_settings(error):
            names = {argument.name.removeprefix("--") for argument in error.argument_collection}
            check_key(option, sorted(names - set(known_keys())))
    if isinstance(error.__cause__, ValidationError):
        message = validation_message(error.__cause__)
        return message if _takes_settings(error) else message.replace("config:", f"{command}:", 1)
    return str(error)


def _takes_settings(error: cyclopts.CycloptsError) -> bool:
    """Whether the command takes the keys of the configuration."""
    return error.command_chain is not None and error.command_chain[-1] in ("train", "replay", "run")


def memory_ran_out(error: Exception | None) -> bool:
    """Whether an error says that there was no memory; libraries say it in ways of their own."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY)


def foreseen(error: Exception) -> bool:
    """Whether an error says what is wrong with input, files or machine; others are faults of zerokl's."""
    return isinstance(error, OSError | ValueError | FloatingPointError) or memory_ran_out(error)


def failure_line(error: Exception) -> str:
    """An error that ends a command, in one line."""
    return one_line(_failure(error))


def _failure(error: Exception) -> str:
    """What an error says of itself; of an error that nobody foresaw, also what it is and where."""
    if not foreseen(error):
        last = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"internal error: {type(error).__name__} ({error}) in {last.filename} line {last.lineno}; "
            "ZEROKL_TRACEBACK=1 shows the way there"
        )
    if isinstance(error, OSError):
        return os_error_line(error)
    if isinstance(error, ValueError | FloatingPointError):
        return str(error)
    return "memory ran out; take a smaller model, micro_batch or number of workers"
