"""The tool calls in a turn of the model.

    json        {"name": "add", "arguments": {"a": 1}}, as the whole turn; or in a fence of three backticks
                with the word json; a list of calls as well
    xml         <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, as Hermes and Qwen do
                <tool_call><function=add><parameter=a>1</parameter></function></tool_call>, as Qwen3-Coder
    template    whatever the tokenizer's response_template says (transformers)

The calls are read from the text of the drawn tokens, without what stands before the last </think>. A turn
has no call, or one or more that are all well formed, or an error that says what is not. Nothing is guessed:
half a call, a key that is there twice, a key that no call has, and a number that JSON does not know are
errors. What an environment makes of an error is its own affair. `answers` hands it to the model.

Nothing here loads torch or numpy (see processes/process.py).
"""

import inspect
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...files.reading import shown

# The forms that an environment may ask for.
FORMS = ("json", "xml", "template")


class ToolCall(NamedTuple):
    """A function and its arguments by name."""

    name: str
    arguments: dict[str, Any]


class ToolCalls(NamedTuple):
    """The calls of a turn, or why they are not well formed. A turn that calls nothing has neither."""

    calls: tuple[ToolCall, ...] = ()
    error: str = ""


def parse_calls(text: str, form: str) -> ToolCalls:
    """The calls in the text of a turn. form: json or xml."""
    try:
        return ToolCalls(tuple(_READERS[form](_without_thoughts(text))))
    except (ValueError, RecursionError) as error:
        return ToolCalls(error=str(error) or type(error).__name__)


def calls_of_message(message: Mapping[str, Any]) -> ToolCalls:
    """The calls of a message of the model as transformers' parse_response gives it."""
    try:
        items = message.get("tool_calls") or []
        return ToolCalls(tuple(_call(item["function"]) for item in items))
    except (ValueError, KeyError, TypeError) as error:
        return ToolCalls(error=f"is no tool call ({error})")


def _without_thoughts(text: str) -> str:
    """What stands after the last thought. Raises ValueError where it has no end."""
    rest = text.rpartition("</think>")[2]
    if "<think>" in rest:
        raise ValueError("has a <think> without its end")
    return rest


def _json(text: str) -> Iterator[ToolCall]:
    whole, end = text.strip(), 0
    if whole.startswith(("{", "[")):
        value, end = _value(whole, 0)
        if end < len(whole):
            raise ValueError(f"has text after its call ({shown(whole[end:])})")
        yield from _calls(value)
        return
    while (start := text.find("```json", end)) >= 0:
        value, end = _value(text, start + len("```json"))
        end = _after(text, end, "```")
        yield from _calls(value)


def _xml(text: str) -> Iterator[ToolCall]:
    end = 0
    while (start := text.find("<tool_call>", end)) >= 0:
        start = _space(text, start + len("<tool_call>"))
        if text.startswith("<function=", start):
            call, end = _function(text, start)
            yield call
        else:
            value, end = _value(text, start)
            yield _call(value)
        end = _after(text, end, "</tool_call>")
    if "</tool_call>" in text[end:]:
        raise ValueError("has a </tool_call> without its beginning")


_FUNCTION = re.compile(r"<function=([^\s<>]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^\s<>]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def _function(text: str, start: int) -> tuple[ToolCall, int]:
    """A call as Qwen3-Coder writes it, and where it ends. A value is JSON if it can be, else a text."""
    match = _FUNCTION.match(text, start)
    if match is None:
        raise ValueError(f"has no name of a function ({shown(text[start:])})")
    name, arguments = match[1], {}
    while parameter := _PARAMETER.match(text, match.end()):
        key, value = parameter.groups()
        if key in arguments:
            raise ValueError(f"has the parameter {key} twice")
        arguments[key] = _json_or_text(value)
        match = parameter
    return ToolCall(name, arguments), _after(text, match.end(), "</function>")


def _json_or_text(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return text


_READERS: dict[str, Callable[[str], Iterator[ToolCall]]] = {"json": _json, "xml": _xml}


def _value(text: str, start: int) -> tuple[Any, int]:
    """A JSON value and where it ends. A string in it may hold whatever ends a call."""
    try:
        return _DECODER.raw_decode(text, _space(text, start))
    except json.JSONDecodeError as error:
        raise ValueError(f"has a call that is no JSON ({error.msg} at character {error.pos})") from None


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object. JSON leaves open what a second value of a key means."""
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise ValueError(f"has the key {next(k for k in keys if keys.count(k) > 1)!r} twice")
    return dict(pairs)


def _constant(name: str) -> Any:
    raise ValueError(f"has {name}, which is no JSON")


def _float(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"has {text}, which is too large for a number")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)


def _space(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def _after(text: str, start: int, mark: str) -> int:
    """The place after `mark`, which must follow."""
    start = _space(text, start)
    if not text.startswith(mark, start):
        raise ValueError(f"has {shown(text[start:])} where {mark} belongs")
    return start + len(mark)


def _calls(value: Any) -> list[ToolCall]:
    return [_call(item) for item in (value if isinstance(value, list) else [value])]


def _call(value: Any) -> ToolCall:
    """A call from its object. Llama calls the arguments parameters."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError(f"has a call without a name ({shown(value)})")
    given = [key for key in ("arguments", "parameters") if key in value]
    if unknown := sorted(set(value) - {"name", *given}):
        raise ValueError(f"has a call with the key {unknown[0]!r}, which no call has")
    arguments = value[given[0]] if len(given) == 1 else None if given else {}
    if not isinstance(arguments, dict):
        raise ValueError(f"has a call whose arguments are no object ({shown(value)})")
    return ToolCall(value["name"], arguments)


def answers(calls: ToolCalls, functions: Mapping[str, Callable[..., Any]]) -> list[dict[str, Any]]:
    """A message of the role `tool` for each call of a turn; or one that says what is wrong with its text.

    functions: the tools by name. What a tool returns is written as text. A tool that refuses its arguments
    raises ValueError, whose words the model reads. Whatever else it raises is the environment's error.
    """
    if calls.error:
        return [{"role": "tool", "content": f"error: your turn {calls.error}"}]
    return [{"role": "tool", "name": c.name, "content": _answer(c, functions)} for c in calls.calls]


def _answer(call: ToolCall, functions: Mapping[str, Callable[..., Any]]) -> str:
    function = functions.get(call.name)
    if function is None:
        return f"error: there is no tool {call.name}; there are {', '.join(functions)}"
    try:
        inspect.signature(function).bind(**call.arguments)
    except TypeError as error:
        return f"error: {call.name} {error}"
    try:
        return str(function(**call.arguments))
    except ValueError as error:
        return f"error: {call.name} {error}"
