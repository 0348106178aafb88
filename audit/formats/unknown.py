"""What to do with a row of no known format: which of its fields look like token ids and log-probabilities."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_FORMAT = "docs/log-format.md"
_SERVER = (
    "these are answers of a server, without the requests that say how they were drawn; record them: put "
    "`zerokl record` before the server, and audit the log that it writes (docs/frameworks/engines.md)"
)
# Levels of a row below which no column is looked for, candidates that are named, and fields that are shown.
_DEPTH, _MOST, _SHOWN = 5, 3, 8
# Parts of the names of columns of ids, and of log-probabilities; and of those that are neither.
_IDS, _LOGPROBS = ("token", "ids"), ("logp", "log_p", "lp")
_OTHERS = ("mask", "position", "offset", "length", "version", "ind", "reward", "score", "adv", "entropy")


def refusal(row: Mapping[str, Any], known: Iterable[str]) -> str:
    """Why a row of no known format is refused, and what to do next."""
    if _is_answer(row):
        return _SERVER
    fields = ", ".join(list(row)[:_SHOWN]) or "no field"
    return f"a row with {fields} is not of a known format ({', '.join(known)}); {remedy(row)}"


def remedy(row: Mapping[str, Any]) -> str:
    """Which fields of a row look like token ids and log-probabilities, and what to do with them."""
    columns = [(name, values) for name, values in _columns(row) if not _named(name, _OTHERS)]
    ids = _likeliest([name for name, values in columns if _are_ids(values)], _IDS)
    logprobs = _likeliest([name for name, values in columns if _are_logprobs(name, values)], _LOGPROBS)
    if ids and logprobs:
        return (
            f"{ids} may be token ids, and {logprobs} log-probabilities: write them as prompt_ids, "
            f"completion_ids and logprobs with zerokl.integrations.recorder.Recorder ({_FORMAT})"
        )
    kinds = {"token ids": ids, "log-probabilities": logprobs}
    missing = " or ".join(kind for kind, names in kinds.items() if not names)
    there = "".join(f"{names} may be {kind}, but " for kind, names in kinds.items() if names)
    return (
        f"{there}nothing in it looks like {missing}: record the run with "
        f"zerokl.integrations.recorder.Recorder, or its server with `zerokl record` ({_FORMAT})"
    )


def _is_answer(row: Mapping[str, Any]) -> bool:
    """Whether a row is what an inference server answered, or holds it, as the files of a batch do."""
    for name in ("response", "body"):
        row = row[name] if isinstance(row.get(name), dict) else row
    return isinstance(row.get("choices"), list) or "meta_info" in row or row.get("object") == "response"


def _columns(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, list]]:
    """The lists of a row that hold no further lists, with their names. Of a list of lists, the first."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if depth > _DEPTH or not value:
        return
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _columns(inner, f"{name}.{key}" if name else str(key), depth + 1)
    elif isinstance(value, list) and (isinstance(value[0], list | Mapping) or hasattr(value[0], "tolist")):
        yield from _columns(value[0], f"{name}[0]", depth + 1)
    elif isinstance(value, list):
        yield name, value


def _are_ids(values: list) -> bool:
    """Whether a column may be token ids: whole numbers that are no mask and do not count up from 0."""
    whole = set(map(type, values)) == {int} and min(values) >= 0
    return whole and max(values) > 1 and values != list(range(len(values)))


def _are_logprobs(name: str, values: list) -> bool:
    """Whether a column may be log-probabilities: its name says so, or it has fractions below 0."""
    numbers = [x for x in values if x is not None]
    if set(map(type, numbers)) - {int, float}:
        return False
    return _named(name, _LOGPROBS) or any(x < 0 and x % 1 for x in numbers)


def _likeliest(names: list[str], parts: tuple[str, ...]) -> str:
    """The names that have one of the parts, or else all: the first few, as a list in words."""
    return ", ".join(([name for name in names if _named(name, parts)] or names)[:_MOST])


def _named(name: str, parts: tuple[str, ...]) -> bool:
    return any(part in name.rpartition(".")[2].lower() for part in parts)
