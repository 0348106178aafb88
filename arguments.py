"""The words of a command line: a command with its own options, and keys of the configuration."""

import contextlib
import difflib
import io
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Union

import tyro
from tyro.conf import OmitSubcommandPrefixes, subcommand

# Commands that take no keys of the configuration.
_NO_KEYS = ("sample", "verify", "audit", "diff", "ablate")


def parse(argv: list[str], commands: Mapping[str, type], description: str) -> tuple[Any, dict[str, str]]:
    """The command with its options, and configuration overrides. Raises ValueError; exits with 2 where tyro does."""
    if argv[:2] == ["verify", "run"]:  # a model folder of that name is ./run
        argv = ["verify-run", *argv[2:]]
    name, overrides = (argv[0] if argv else ""), {}
    if name and not name.startswith("-"):
        if name not in commands:
            near = difflib.get_close_matches(name, commands, 1)
            raise ValueError(f"unknown command {name}; " + (f"did you mean {near[0]}?" if near else f"choose {', '.join(commands)}"))
        rest, overrides = _take_overrides(argv[1:], commands[name])
        argv = [name, *rest]
        if name in _NO_KEYS:
            _check_options(name, commands[name], overrides)
    kinds = Union[tuple(Annotated[kind, subcommand(name)] for name, kind in commands.items())]  # noqa: UP007
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(kinds, prog="zerokl", args=argv, config=(OmitSubcommandPrefixes,), description=description), overrides
    except SystemExit as ended:
        if not ended.code:
            raise
        raise ValueError(re.sub("[\u2500-\u257f]|-{3,}", " ", said.getvalue())) from None


def _take_overrides(words: list[str], command: type) -> tuple[list[str], dict[str, str]]:
    """Split a command's words into its own options and --key value (or --key=value) pairs of the configuration.

    Raises ValueError for a key without a value.
    """
    own = {f.name for f in fields(command)} | {"help"}
    kept, overrides, i = [], {}, 0
    while i < len(words):
        key, equals, value = words[i].partition("=")
        name = key[2:].replace("-", "_")
        if not key.startswith("--") or name in own:
            kept.append(words[i])
        elif equals:
            overrides[name] = value
        elif i + 1 < len(words) and not words[i + 1].startswith("--"):
            i += 1
            overrides[name] = words[i]
        else:
            raise ValueError(f"{key} lacks a value")
        i += 1
    return kept, overrides


def only_task_keys(name: str, command: object, overrides: dict[str, str]) -> None:
    """Raise ValueError for a key that has no meaning outside a training run."""
    _check_options(name, type(command), {key: value for key, value in overrides.items() if not key.startswith("task.")})


def _check_options(name: str, command: type, overrides: dict[str, str]) -> None:
    """Raise ValueError for an option that a command without configuration does not have."""
    for key in overrides:
        near = difflib.get_close_matches(key, [f.name for f in fields(command)], 1)
        hint = f"did you mean --{near[0].replace('_', '-')}?" if near else f"see zerokl {name} --help"
        raise ValueError(f"{name}: unknown option --{key.replace('_', '-')}; {hint}")
