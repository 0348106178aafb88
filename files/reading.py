"""Reads JSON and TOML that anybody may have written, with bounds on length and depth; and shows their values.

A text that is too long or too deep would otherwise take all time or memory, or end Python's stack somewhere
else. Every error is a ValueError of one line. It says what is wrong; the caller says where.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from math import isfinite, isnan
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from .inputs import LINE_BYTES, read_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Nested lists and tables: the deepest of our own files has six.
DEPTH = 32
# Characters or bytes of one JSON value. A line of rollouts.jsonl has about 30 bytes for each token.
LONGEST_JSON = LINE_BYTES
# tomllib is plain Python, at about 1 MB a second.
LONGEST_TOML = 1 << 20
# Characters of a value that an error shows.
_SHOWN = 80
# Characters of an error's line.
_LINE = 2000


def shown(value: object) -> str:
    """repr(value), cut where it is long."""
    # repr of a nested or long value may itself take all memory.
    if isinstance(value, str | bytes) and len(value) > _SHOWN:
        return f"{value[:_SHOWN]!r}... ({len(value):,} characters)"
    if isinstance(value, int) and value.bit_length() > 3 * _SHOWN:
        return f"an integer of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]}... ({len(text):,} characters)"


def printable(text: str, keep: str = "\n\t") -> str:
    """A text with an escape for each character that a terminal would obey or hide.

    These are control characters, changes of direction, and surrogates. Those in `keep` stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """A text as one line that a terminal can show: no control characters, and cut where it is long."""
    line = printable(" ".join(text.split())[: 2 * _LINE])
    return line if len(line) <= _LINE else f"{line[:_LINE]}..."


def first_few(words: Sequence[str], most: int) -> str:
    """Words with commas between them, `most` of them at most, and how many more there are."""
    more = f" and {len(words) - most:,} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def parse_json(text: str | bytes, non_finite: bool = False) -> Any:
    """The value of a JSON text.

    non_finite: takes NaN and Infinity too, which Python writes and JSON does not have. Raises ValueError.
    """
    _check_length(text, LONGEST_JSON, "JSON")
    try:
        value = _value(text, non_finite)
    except RecursionError:
        raise ValueError(f"is nested deeper than {DEPTH} levels") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 ({error.reason} at byte {error.start})") from None
    except ValueError as error:  # JSONDecodeError, an integer of thousands of digits, or a refused constant
        raise ValueError(f"is not JSON ({error})") from None
    # There are no more levels than brackets, and a line of a log has few.
    if sum(map(text.count, ("[", "{") if isinstance(text, str) else (b"[", b"{"))) > DEPTH:
        _check_depth(value)
    return value


def _value(text: str | bytes, non_finite: bool) -> Any:
    """What json.loads gives, by a parser of a third of its time that refuses more. json has the last word."""
    try:
        return from_json(text, allow_inf_nan=non_finite)
    except ValueError:
        return json.loads(text, parse_constant=None if non_finite else _refuse_constant)


# JSON has no infinities and no NaN. Where a value may be one, as a log-probability may, it is named instead.
_NON_FINITE = ("Infinity", "-Infinity", "NaN")
_AS_IT_IS = {int, str, bool, type(None)}


def json_ready(x: Any) -> Any:
    """A copy of x for JSON: each infinity and each NaN is replaced by its name, which json_number reads.

    x: dicts, lists and values.
    """
    if isinstance(x, dict):
        return {k: v if type(v) in _AS_IT_IS else json_ready(v) for k, v in x.items()}
    if isinstance(x, list):
        # A call for each of a run's log-probabilities would take longer than writing them does.
        return [v if type(v) in _AS_IT_IS or (type(v) is float and isfinite(v)) else json_ready(v) for v in x]
    if isinstance(x, float) and not isfinite(x):
        return "NaN" if isnan(x) else "Infinity" if x > 0 else "-Infinity"
    return x


def json_number(x: Any) -> Any:
    """The number that x is the name of (see json_ready), or x itself. Of a list, each member."""
    if isinstance(x, list):
        return [json_number(v) for v in x] if str in set(map(type, x)) else x
    return float(x) if isinstance(x, str) and x in _NON_FINITE else x


def read_json(path: Path, non_finite: bool = False) -> Any:
    """The value in a JSON file. See parse_json. Raises OSError and ValueError."""
    return parse_json(read_bytes(path, LONGEST_JSON), non_finite)


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises ValueError."""
    _check_length(text, LONGEST_TOML, "TOML")
    try:
        value = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"is nested deeper than {DEPTH} levels") from None
    except ValueError as error:
        raise ValueError(f"is not valid TOML ({error})") from None
    _check_depth(value)
    return value


def read_toml(path: Path, stream: bool = False) -> dict[str, Any]:
    """The tables of a TOML file; with `stream`, also of a pipe. Raises OSError and ValueError."""
    content = read_bytes(path, LONGEST_TOML, stream)
    try:
        return parse_toml(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 ({error.reason} at byte {error.start})") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _check_length(text: str | bytes, longest: int, kind: str) -> None:
    if len(text) > longest:
        raise ValueError(f"has {len(text):,} characters, more than {longest:,} of {kind} are not read")


def _check_depth(value: Any) -> None:
    level: Sequence[Any] = [value]
    for _ in range(DEPTH + 1):
        level = [x for nested in map(_members, level) for x in nested if isinstance(x, dict | list)]
        if not level:
            return
    raise ValueError(f"is nested deeper than {DEPTH} levels")


def _members(value: Any) -> Any:
    return value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
