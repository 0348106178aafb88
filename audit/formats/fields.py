"""Checks of the values of a log's line. Each raises ValueError that names the field and the value."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from ...files.reading import json_number
from ...kernels.sampling_params import SamplingParams, bias_by_id, refuse_penalties
from .record import LOGGED_NAN, TokenIds, least_and_most

_NUMBERS = {int, float}
_PLAIN = {int, float, type(None)}
# Beyond it a JSON number is no exact whole number in every reader.
_LARGEST = 2**53
_LARGEST_FP32 = float(np.finfo(np.float32).max)


def number(name: str, value: Any, default: float | None = None) -> float:
    """A number, or the name of one that JSON does not have. null, or a missing value, is the default."""
    if value is None and default is not None:
        return default
    value = json_number(value)
    if type(value) not in _NUMBERS:
        raise ValueError(f"{name} ({_short(value)}) must be a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} ({_short(value)}) is beyond the numbers of a computer") from None


def optional_number(name: str, value: Any) -> float | None:
    """A number, or None where there is none. "NaN", "Infinity" and "-Infinity" are numbers as well."""
    return None if value is None else number(name, json_number(value))


def integer(name: str, value: Any, default: int | None = None) -> int:
    """A whole number; 2.0 is one."""
    result = number(name, value, None if default is None else float(default))
    if not result.is_integer() or abs(result) > _LARGEST:
        raise ValueError(f"{name} ({_short(value)}) must be a whole number")
    return int(result)


def optional_integer(name: str, value: Any) -> int | None:
    """A whole number, or None where there is none."""
    return None if value is None else integer(name, value)


def label(name: str, value: Any) -> int | str | None:
    """A name or a number of a prompt or a sample."""
    if value is not None and type(value) not in (int, str):
        raise ValueError(f"{name} ({_short(value)}) must be a whole number or a text")
    return value


def text(name: str, value: Any) -> str | None:
    """A text, or None where there is none."""
    if value is not None and type(value) is not str:
        raise ValueError(f"{name} ({_short(value)}) must be a text")
    return value


def truncated(name: str, value: Any) -> bool | None:
    """Whether the reason for which a completion ended is a limit of tokens; None where none is given.

    SGLang's reason is an object with a type.
    """
    reason = text(name, value.get("type") if type(value) is dict else value)
    return None if reason is None else reason in ("length", "truncated")


def mapping(name: str, value: Any) -> dict[str, Any]:
    """A JSON object; empty where there is none."""
    if value is not None and type(value) is not dict:
        raise ValueError(f"{name} ({_short(value)}) must be a JSON object")
    return value or {}


def listed(name: str, value: Any, items: str) -> list:
    """A JSON list. items: what it holds, in words."""
    if type(value) is not list:
        raise ValueError(f"{name} ({_short(value)}) must be a list of {items}")
    return value


def objects(name: str, value: Any, items: str) -> list[dict[str, Any]]:
    """A JSON list of objects; `items` says what they are."""
    for index, item in enumerate(listed(name, value, items)):
        if type(item) is not dict:
            raise ValueError(f"{name}[{index}] ({_short(item)}) must be a JSON object")
    return value


@contextmanager
def named(place: str) -> Iterator[None]:
    """Inside, an error of a part of a line begins with the place of the part."""
    try:
        yield
    except (KeyError, ValueError) as error:
        raise named_error(place, error) from None


def named_error(place: str, error: KeyError | ValueError) -> ValueError:
    """An error of a part of a line with the place of the part before it."""
    return ValueError(f"{place}: {f'{error.args[0]} is missing' if isinstance(error, KeyError) else error}")


def token_ids(name: str, value: Any) -> TokenIds:
    """Token ids, at least one."""
    if type(value) is not list or not value or set(map(type, value)) != {int}:
        raise ValueError(f"{name} ({_short(value)}) must be a list of token ids that is not empty")
    if not 0 <= min(value) <= max(value) < 2**31:
        wrong = next(t for t in value if not 0 <= t < 2**31)
        raise ValueError(f"{name} holds {wrong}, which is no token id")
    return tuple(value)


def mask(name: str, value: Any, count: int) -> np.ndarray | None:
    """Which tokens were drawn, [count] bool; None where all were."""
    if value is None:
        return None
    if type(value) is not list or not set(map(type, value)) <= {int, float, bool}:
        raise ValueError(f"{name} ({_short(value)}) must be a list of 0 and 1")
    if len(value) != count:
        raise _other_length(name, value, count)
    if not set(value) <= {0, 1}:
        index = next(i for i, x in enumerate(value) if x not in (0, 1))
        raise ValueError(f"{name}[{index}] ({_short(value[index])}) must be 0 or 1")
    return np.array(value, bool)


def logprobs(name: str, value: Any, count: int, drawn: np.ndarray | None = None) -> np.ndarray:
    """The numbers of a column of log-probabilities, [count] fp32, whether they can be such or not.

    NaN stands for null, and for a token that was not drawn; LOGGED_NAN for the log's NaN. The names "NaN",
    "Infinity" and "-Infinity" are numbers too. A finite number stays finite.
    drawn: [count] bool; what stands beside the other tokens does not matter. None: all were drawn.
    """
    types = set(map(type, listed(name, value, "numbers")))
    if types == {float} and drawn is None and len(value) == count:
        exact = np.array(value, np.float64)
        least, most = least_and_most(exact)
        if least >= -_LARGEST_FP32 and most <= _LARGEST_FP32:  # NaN is neither
            return exact.astype(np.float32)
    value = json_number(value)
    types = set(map(type, value)) if str in types else types
    if not types <= {int, float, type(None)}:
        index = next(i for i, x in enumerate(value) if type(x) not in (int, float, type(None)))
        raise ValueError(f"{name}[{index}] ({_short(value[index])}) must be a number")
    if len(value) != count:
        raise _other_length(name, value, count)
    absent = np.array([x is None for x in value], bool) if type(None) in types else np.zeros(count, bool)
    if absent.any():
        value = [0.0 if x is None else x for x in value]
    try:
        exact = np.array(value, np.float64)
    except OverflowError:
        index = max((i for i, x in enumerate(value) if type(x) is int), key=lambda i: abs(value[i]))
        raise ValueError(
            f"{name}[{index}] ({_short(value[index])}) is beyond the numbers of a computer"
        ) from None
    if drawn is None and not absent.any() and np.abs(exact).max(initial=0.0) <= _LARGEST_FP32:
        return exact.astype(np.float32)
    finite = np.clip(exact, -_LARGEST_FP32, _LARGEST_FP32)
    result = np.where(np.isinf(exact), exact, finite).astype(np.float32)
    result[np.isnan(exact)] = LOGGED_NAN
    result[absent if drawn is None else absent | ~drawn] = np.nan
    return result


def optional_logprobs(
    name: str, value: Any, count: int, drawn: np.ndarray | None = None
) -> np.ndarray | None:
    """The numbers of a column, or None where the log has no such column. See logprobs."""
    return None if value is None else logprobs(name, value, count, drawn)


def optional_params(name: str, value: Any) -> SamplingParams | None:
    """The distribution that an object declares, or None where it has no temperature."""
    values = mapping(name, value)
    return None if values.get("temperature") is None else sampling_params(values)


def sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    """The distribution that an object with vLLM's names declares. Other members are passed over.

    A top_k of 0 or below, and what is missing or null, keep all tokens. Raises KeyError where there is no
    temperature. Raises ValueError for a bad value, and for a penalty: no score has it.
    """
    refuse_penalties("sampling", values)
    allowed, bias = values.get("allowed_token_ids"), values.get("logit_bias")
    plain = values["temperature"], values.get("top_k"), values.get("top_p"), values.get("min_p")
    if allowed is None and (bias is None or bias == {}) and {*map(type, plain)} <= _PLAIN:
        return _params(*plain)
    return _of_numbers(*plain, _logit_bias(bias), allowed)


def _of_numbers(
    temperature: Any, top_k: Any, top_p: Any, min_p: Any, bias: dict[int, float], allowed: Any
) -> SamplingParams:
    return SamplingParams.of(
        number("temperature", temperature),
        max(0, integer("top_k", top_k, 0)),
        number("top_p", top_p, 1.0),
        number("min_p", min_p, 0.0),
        bias,
        None if allowed is None else token_ids("allowed_token_ids", allowed),
    ).check()


@lru_cache(maxsize=64, typed=True)
def _params(
    temperature: float, top_k: float | None, top_p: float | None, min_p: float | None
) -> SamplingParams:
    """The parameters without bias and allowed tokens. Most lines of a log say the same ones."""
    return _of_numbers(temperature, top_k, top_p, min_p, {}, None)


def _logit_bias(value: Any) -> dict[int, float]:
    table = mapping("logit_bias", value)
    try:
        by_id = bias_by_id(table)
    except ValueError as error:
        raise ValueError(f"logit_bias: {error}") from None
    return {token: number(f"logit_bias of token {token}", bias) for token, bias in by_id.items()}


def versions(name: str, value: Any, count: int) -> tuple[tuple[int, int] | None, np.ndarray | None]:
    """The oldest and newest weights, and the version of each token where `value` is a list of them."""
    if value is None:
        return None, None
    if type(value) is not list:
        version = integer(name, value)
        return (version, version), None
    if len(value) != count or set(map(type, value)) != {int} or max(map(abs, value)) > _LARGEST:
        raise ValueError(
            f"{name} ({_short(value)}) must be a whole number, or one for each of the completion's "
            f"{count} tokens"
        )
    return (min(value), max(value)), np.array(value, np.int64)


def decimals(name: str, value: Any) -> int | None:
    """How many decimals a column has, or None where nothing was cut."""
    if value is None:
        return None
    if not 0 <= (count := integer(name, value)) <= 20:
        raise ValueError(f"{name} ({count}) must lie in 0 .. 20")
    return count


def advantage(name: str, value: Any, count: int) -> float | tuple[float, ...] | None:
    """One advantage, or one for each token; NaN for null."""
    if type(value) is not list:
        return optional_number(name, value)
    if len(value) != count:
        raise _other_length(name, value, count)
    return tuple(number(f"{name}[{i}]", x, math.nan) for i, x in enumerate(json_number(value)))


def sampling_mask(name: str, value: Any, completion: TokenIds) -> tuple[TokenIds | None, ...] | None:
    """The kept ids of each token. A token that is not among its own kept ids was not drawn from them."""
    if value is None:
        return None
    if len(listed(name, value, "lists of token ids")) != len(completion):
        raise _other_length(name, value, len(completion))
    kept = tuple(None if ids is None else token_ids(f"{name}[{i}]", ids) for i, ids in enumerate(value))
    for i, (token, ids) in enumerate(zip(completion, kept, strict=True)):
        if ids is not None and token not in ids:
            raise ValueError(
                f"{name}[{i}] keeps {len(ids)} ids, and the drawn token {token} is not among them"
            )
    return kept


def routed_experts(name: str, value: Any, lengths: Sequence[int]) -> np.ndarray | None:
    """Expert ids [tokens, layers, k] int32; `lengths` are the numbers of tokens that are allowed."""
    if value is None:
        return None
    try:
        experts = np.array(value)
    except ValueError:
        experts = np.empty(0)
    if experts.ndim != 3 or experts.dtype.kind != "i" or experts.min(initial=0) < 0:
        raise ValueError(f"{name} must be expert ids, nested as tokens, layers, k")
    if len(experts) not in lengths:
        allowed = " or ".join(map(str, dict.fromkeys(lengths)))
        raise ValueError(f"{name} has {len(experts)} tokens, not {allowed}")
    return experts.astype(np.int32)


def _other_length(name: str, value: Sequence, count: int) -> ValueError:
    return ValueError(f"{name} has {len(value)} entries for a completion of {count} tokens")


def _short(value: Any) -> str:
    """repr, cut: one line must stay readable."""
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
