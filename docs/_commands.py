"""The page of the commands: what each says of itself, with its arguments, from the code."""

import inspect
import re
import types
import typing

import cyclopts
from zerokl.cli import app as cli
from zerokl.cli.app import listed
from zerokl.engine.config.run_config import Config
from zerokl.pages.markdown import table

from ._markdown import prose


def commands() -> str:
    """Every command: its usage, what it says of itself, and its arguments."""
    parts: list[str] = []
    for name in sorted((n for n in cli if not n.startswith("-")), key=_place):
        sub = cli[name]
        if sub.default_command:
            parts += _command(f"zerokl {name}", sub.default_command)
        for inner in (n for n in sub if not n.startswith("-")):
            parts += _command(f"zerokl {name} {inner}", sub[inner].default_command)
    return "\n".join(parts)


def _place(name: str) -> tuple[int, int]:
    """Where help lists a command: the place of its group, and its place there."""
    place = listed(name)
    return place["group"].sort_key, place["sort_key"]


def _command(title: str, function) -> list[str]:
    text, _, arguments = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")
    described = dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", arguments, re.M))
    hints = typing.get_type_hints(function, include_extras=True)
    usage, rows, settings = [title], [], False
    for parameter in inspect.signature(function).parameters.values():
        hint = hints[parameter.name]
        extra = next(
            (m for m in getattr(hint, "__metadata__", ()) if isinstance(m, cyclopts.Parameter)), None
        )
        if extra is not None and "*" in (extra.name or ()):
            model = typing.get_args(hint)[0]
            settings = issubclass(model, Config)  # cli/config_options.py makes subclasses of it
            rows += [] if settings else map(_setting, *zip(*model.model_fields.items(), strict=True))
            continue
        required = parameter.default is inspect.Parameter.empty
        if parameter.kind is parameter.POSITIONAL_ONLY:
            usage.append(parameter.name.upper() if required else f"[{parameter.name.upper()}]")
            shown = parameter.name.upper()
        else:
            shown = "--" + (extra.name[0] if extra is not None and extra.name else parameter.name)
            if required:
                usage.append(f"{shown} VALUE")
            shown += "".join(f", {alias}" for alias in (extra.alias if extra else None) or ())
        default = "required" if required else _argument_default(parameter.default)
        if parameter.name not in described:
            raise ValueError(f"cli: {title}: the docstring says nothing of {parameter.name}")
        rows.append([f"`{shown}`", _argument_type(hint), default, prose(described[parameter.name])])
    usage += ["[options]"] if any(row[0].startswith("`--") for row in rows) else []
    usage += ["[--KEY VALUE ...]"] if settings else []
    parts = [f"## {title}", "", "```text", " ".join(usage), "```", ""]
    for paragraph in text.strip().split("\n\n"):
        parts += [prose(paragraph), ""]
    parts += [table(["argument", "type", "default", "meaning"], rows), ""]
    if settings:
        parts += ["It also takes [every key of the configuration](configuration.md) as `--KEY VALUE`.", ""]
    return parts


def _setting(name: str, field) -> list[str]:
    """The row of a setting that a command takes as an option, and that no page of the configuration has."""
    default = _argument_default(field.get_default(call_default_factory=True))
    return [f"`--{name}`", _argument_type(field.annotation), default, prose(field.description or "")]


def _argument_type(hint: object) -> str:
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(_argument_type(a) for a in typing.get_args(hint) if a is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        return f"{_argument_type(typing.get_args(hint)[0])}, may be repeated"
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{v}`" for v in typing.get_args(hint))
    return {str: "text", int: "whole number", float: "number", bool: "flag"}.get(hint, "key and value")


def _argument_default(default: object) -> str:
    if default in (None, "", ()) or default == {}:
        return ""
    if isinstance(default, tuple):
        return ", ".join(f"`{v}`" for v in default)
    return "off" if default is False else f"`{default}`"
