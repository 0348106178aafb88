"""Tool calls: what is one to the letter, what is none, and what is half a one."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zerokl.engine.tasks.tool_calls import ToolCall, ToolCalls, answers, calls_of_message, parse_calls

from tests.helpers import property_settings

ADD = ToolCall("add", {"a": 1, "b": [2.5, None]})
TEXT = '{"name": "add", "arguments": {"a": 1, "b": [2.5, null]}}'


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("json", TEXT, [ADD]),
        ("json", f"  {TEXT}\n", [ADD]),
        ("json", f"[{TEXT}, {TEXT}]", [ADD, ADD]),
        ("json", f"I add.\n```json\n{TEXT}\n```\nand again ```json{TEXT}```", [ADD, ADD]),
        ("json", f"<think>{TEXT}</think>no", []),
        ("json", "the answer is {5}", []),
        ("json", "", []),
        ("json", '{"name": "f", "parameters": {"x": "```"}}', [ToolCall("f", {"x": "```"})]),
        ("json", '{"name": "now"}', [ToolCall("now", {})]),
        ("xml", f"<tool_call>\n{TEXT}\n</tool_call>", [ADD]),
        ("xml", f"a<tool_call>{TEXT}</tool_call><tool_call>{TEXT}</tool_call>b", [ADD, ADD]),
        ("xml", f"<think><tool_call></think><tool_call>{TEXT}</tool_call>", [ADD]),
        ("xml", TEXT, []),
        (
            "xml",
            '<tool_call>{"name": "say", "arguments": {"x": "</tool_call>{\\""}}</tool_call>',
            [ToolCall("say", {"x": '</tool_call>{"'})],
        ),
        (
            "xml",
            "<tool_call>\n<function=run>\n<parameter=code>\nif a:\n  b\n</parameter>\n<parameter=n>\n3\n"
            "</parameter>\n</function>\n</tool_call>",
            [ToolCall("run", {"code": "if a:\n  b", "n": 3})],
        ),
    ],
)
def test_calls_are_read(form, text, calls):
    assert parse_calls(text, form) == ToolCalls(tuple(calls))


@pytest.mark.parametrize(
    ("form", "text", "error"),
    [
        ("json", TEXT[:-1], "is no JSON"),
        ("json", f"{TEXT} so", "text after its call"),
        ("json", f"```json\n{TEXT}", "where ``` belongs"),
        ("json", f"<think>{TEXT}", "<think> without its end"),
        ("json", "{}", "without a name"),
        ("json", '{"name": 3}', "without a name"),
        ("json", '{"name": "f", "arguments": "x"}', "no object"),
        ("json", '{"name": "f", "arguments": {}, "parameters": {}}', "no object"),
        ("json", '{"name": "f", "id": 1}', "'id', which no call has"),
        ("json", '{"name": "f", "arguments": {"a": 1, "a": 2}}', "'a' twice"),
        ("json", '{"name": "f", "name": "g"}', "'name' twice"),
        ("json", '{"name": "f", "arguments": {"a": NaN}}', "NaN, which is no JSON"),
        ("json", '{"name": "f", "arguments": {"a": 1e999}}', "too large"),
        ("json", "[" * 100_000, "."),
        ("xml", f"<tool_call>{TEXT}", "where </tool_call> belongs"),
        ("xml", f"{TEXT}</tool_call>", "without its beginning"),
        ("xml", f"<tool_call>{TEXT}{TEXT}</tool_call>", "where </tool_call> belongs"),
        ("xml", f"<tool_call><tool_call>{TEXT}</tool_call></tool_call>", "is no JSON"),
        ("xml", f"<tool_call>[{TEXT}]</tool_call>", "without a name"),
        ("xml", "<tool_call><function=f><parameter=a>1</parameter></tool_call>", "</function> belongs"),
        ("xml", "<tool_call><function=f><parameter=a>1</function></tool_call>", "</function> belongs"),
        (
            "xml",
            "<tool_call><function=f><parameter=a>1</parameter>"
            "<parameter=a>2</parameter></function></tool_call>",
            "parameter a twice",
        ),
    ],
)
def test_what_is_no_call_is_said(form, text, error):
    calls = parse_calls(text, form)
    assert calls.calls == ()
    assert re.search(re.escape(error) if error != "." else error, calls.error)
    assert len(calls.error) < 300


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.sampled_from('ab"\\{}[]<>/`\n \u00e9') | st.characters(codec="utf-8"), max_size=12)
    | st.sampled_from(["</tool_call>", "<tool_call>", "```", "```json"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
CALL = st.builds(
    ToolCall, st.text(min_size=1, max_size=8), st.dictionaries(st.text(max_size=5), JSON, max_size=3)
)


@property_settings(200)
@given(st.lists(CALL, min_size=1, max_size=4), st.booleans(), st.sampled_from(["", "\n", " \n "]), st.data())
def test_what_is_written_is_read(calls, ascii_only, space, data):
    texts = [json.dumps(c._asdict(), ensure_ascii=ascii_only) for c in calls]
    xml = "".join(f"so{space}<tool_call>{space}{text}{space}</tool_call>" for text in texts)
    fences = "".join(f"so{space}```json{space}{text}{space}```" for text in texts)
    if "think>" not in xml:
        assert parse_calls(xml, "xml").calls == tuple(calls)
        assert parse_calls(fences, "json").calls == tuple(calls)
        assert parse_calls(f"[{', '.join(texts)}]", "json").calls == tuple(calls)
        cut = data.draw(st.integers(1, len(texts[-1])))
        half = xml.rstrip()[: -len("</tool_call>")].rstrip()[:-cut]
        assert parse_calls(half, "xml").error, "half a call is none"


def by_trying(text: str) -> list[dict] | None:
    """The JSON of all calls in tags, found by trying every end of a tag; None where one has no JSON."""
    calls, rest = [], text
    while (start := rest.find("<tool_call>")) >= 0:
        rest = rest[start + len("<tool_call>") :]
        for end in [m.start() for m in re.finditer("</tool_call>", rest)]:
            try:
                value = json.loads(rest[:end])
            except ValueError:
                continue
            calls.append(value)
            rest = rest[end + len("</tool_call>") :]
            break
        else:
            return None
    return None if "</tool_call>" in rest else calls


PIECES = ["<tool_call>", "</tool_call>", TEXT, '{"name": "f"}', '"</tool_call>"', "x", "{", "}", " "]


@property_settings(400)
@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_a_reader_of_another_kind_finds_the_same(text):
    expected = by_trying(text)
    calls = parse_calls(text, "xml")
    if expected is None or not all(isinstance(x, dict) and "name" in x for x in expected):
        assert calls.error
    else:
        assert calls == ToolCalls(tuple(ToolCall(x["name"], x.get("arguments", {})) for x in expected))


def divide(a: int, b: int) -> float:
    if b == 0:
        raise ValueError("cannot divide by 0")
    return a / b


def test_answers_are_messages_and_errors_are_for_the_model_to_read():
    calls = [("divide", {"a": 1, "b": 2}), ("divide", {"a": 1, "b": 0}), ("divide", {"a": 1}), ("add", {})]
    contents = [
        m["content"] for m in answers(ToolCalls(tuple(ToolCall(*c) for c in calls)), {"divide": divide})
    ]
    assert contents == [
        "0.5",
        "error: divide cannot divide by 0",
        "error: divide missing a required argument: 'b'",
        "error: there is no tool add; there are divide",
    ]
    (message,) = answers(parse_calls("<tool_call>", "xml"), {"divide": divide})
    assert message["role"] == "tool"
    assert message["content"].startswith("error: your turn has a call that is no JSON")
    with pytest.raises(ZeroDivisionError):
        answers(ToolCalls((ToolCall("f", {}),)), {"f": lambda: 1 / 0})


def test_a_message_of_transformers_is_read():
    function = {"name": "add", "arguments": {"a": 1}}
    assert calls_of_message({"tool_calls": [{"function": function}]}).calls == (ToolCall("add", {"a": 1}),)
    assert calls_of_message({"content": "x"}) == ToolCalls()
    assert calls_of_message({"tool_calls": [{"function": {"name": 1}}]}).error
    assert calls_of_message({"tool_calls": 3}).error
