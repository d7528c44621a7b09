"""Tool calls are read from text in every spelling, and nothing that a model writes raises."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentflow.engine.tool_calls import ContentGate, ParsedCall, parse_tool_calls, tool_call_schema

ADD = '{"name": "add", "arguments": {"a": 1}}'
CALL = ParsedCall("add", {"a": 1})


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f"<tool_call>\n{ADD}\n</tool_call>", ""),
        (f"<tool_call>{ADD}</tool_call>", ""),
        (f"<tool_call>{ADD}", ""),
        (f"I add.\n<tool_call>{ADD}</tool_call>\n", "I add."),
        (f"I add.\n<tool_call>{ADD}</tool_call>\nDone", "I add.\nDone"),
        (f"<|python_tag|>{ADD}", ""),
        (f"So:<|python_tag|>{ADD}", "So:"),
        (f"[TOOL_CALLS][{ADD}]", ""),
        (ADD, ""),
        (f"  {ADD}\n", ""),
        (f"[{ADD}]", ""),
        (f"```json\n{ADD}\n```", ""),
        ('{"name": "add", "parameters": {"a": 1}}', ""),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', ""),
    ],
)
def test_spellings(text: str, content: str) -> None:
    taken = parse_tool_calls(text)
    assert taken.calls == (CALL,)
    assert taken.content == content
    assert not taken.broken


def test_several_calls_in_order() -> None:
    for text in (
        "".join(f'<tool_call>{{"name": "t{i}", "arguments": {{}}}}</tool_call>\n' for i in range(500)),
        "<|python_tag|>" + ";".join(f'{{"name": "t{i}", "parameters": {{}}}}' for i in range(500)),
        json.dumps([{"name": f"t{i}", "arguments": {}} for i in range(500)]),
    ):
        taken = parse_tool_calls(text)
        assert [c.name for c in taken.calls] == [f"t{i}" for i in range(500)]
        assert taken.content == ""


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>', "add"),
        ('<tool_call>{"name": "add", "argu', "add"),
        ("<tool_call></tool_call>", None),
        ("<tool_call>add(1)</tool_call>", None),
        ('<tool_call>{"arguments": {}}</tool_call>', None),
        ('<tool_call>{"name": 7}</tool_call>', None),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "add"),
        ('<tool_call>{"name": "add", "arguments": "not json"}</tool_call>', "add"),
        ("<tool_call>[1, 2]</tool_call>", None),
        ('<|python_tag|>brave.call(query="x")', None),
        ("<tool_call>" + "[" * 100_000, None),
    ],
)
def test_broken_calls_are_reported(text: str, name: str | None) -> None:
    taken = parse_tool_calls(text)
    assert not taken.calls
    assert len(taken.broken) == 1
    assert taken.broken[0].name == name
    assert taken.broken[0].error
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads(taken.broken[0].text)  # so that no reader of partial JSON takes it for arguments
    assert len(taken.broken[0].text) < 5000


def test_a_broken_call_spares_its_neighbours() -> None:
    taken = parse_tool_calls(f'<tool_call>{{"name": <tool_call>{ADD}</tool_call> x <tool_call>{ADD}</tool_call>')
    assert taken.calls == (CALL, CALL)
    assert len(taken.broken) == 1
    assert taken.content == "x"


@pytest.mark.parametrize(
    "text", ["", "Hello.", '{"name": "Bob", "age": 3}', '{"name": "add", "arguments"', "[]", "{", "[1]", "```\nx\n```"]
)
def test_other_text_stays_text(text: str) -> None:
    taken = parse_tool_calls(text)
    assert taken.content == text.rstrip()
    assert not taken.calls
    assert not taken.broken


fragments = st.lists(
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            "<tool",
            "_call>",
            ADD,
            "<|python_tag|>",
            "[TOOL_CALLS]",
            "{",
            "[",
            "`",
            " ",
            "\n",
        ]
    )
    | st.text(max_size=8),
    max_size=12,
)


@given(fragments)
@example([" ", "<", "<tool_call>", ADD])
def test_what_the_gate_lets_through_is_the_beginning_of_the_content(pieces: list[str]) -> None:
    gate = ContentGate()
    passed = "".join(gate.feed(p) for p in pieces)
    assert gate.passed == len(passed)
    assert parse_tool_calls("".join(pieces)).content.startswith(passed)


def test_the_gate_does_not_hold_back_plain_text() -> None:
    gate = ContentGate()
    assert gate.feed("Hello wor") == "Hello wor"
    assert gate.feed("ld ") == "ld"
    assert gate.feed("a < b") == " a < b"
    assert gate.feed(" <tool") == ""
    assert gate.feed("s are here") == " <tools are here"


def tool(name: str, parameters: dict[str, object]) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_schema_of_a_forced_call() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    tools = [
        tool("a", {"type": "object", "properties": {"n": {"$ref": "#/$defs/Node"}}, "$defs": {"Node": node}}),
        tool(
            "b",
            {"type": "object", "properties": {"n": {"$ref": "#/$defs/Node"}}, "$defs": {"Node": {"type": "integer"}}},
        ),
    ]
    either = tool_call_schema(tools)
    assert [o["properties"]["name"]["const"] for o in either["anyOf"]] == ["a", "b"]
    assert either["$defs"]["t0_Node"]["properties"]["next"] == {"$ref": "#/$defs/t0_Node"}
    assert either["$defs"]["t1_Node"] == {"type": "integer"}
    one = tool_call_schema(tools, "b")
    assert one["properties"]["arguments"]["properties"]["n"] == {"$ref": "#/$defs/t1_Node"}
    assert "t0_Node" not in one["$defs"]
