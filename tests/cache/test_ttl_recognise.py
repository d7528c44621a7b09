"""Tools recognised from answers: JSON calls in their spellings, fenced bash, and what is neither."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.cache.ttl import ToolKey, command_word, recognise_tool


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Let me look.\n```bash\nls -la\n```\n", ToolKey("bash", "ls")),
        ("```sh\ncd /testbed && python -m pytest -x tests\n```", ToolKey("bash", "pytest")),
        ("```bash\nls\n```\nthen\n```bash\ncat x\n```", None),
        ("```python\nprint(1)\n```", None),
        ("```bash\n# nothing\n```", None),
        ('<tool_call>\n{"name": "search", "arguments": {"q": "kv"}}\n</tool_call>', ToolKey("search")),
        ('{"name": "bash", "parameters": {"command": "grep -rn foo ."}}', ToolKey("bash", "grep")),
        ('I call {"name": "f", "arguments": "{\\"cmd\\": \\"make test\\"}"} now', ToolKey("f", "make")),
        ('{"tool_calls": [{"id": "1", "function": {"name": "g", "arguments": "{}"}}]}', ToolKey("g")),
        ('[{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]', ToolKey("a")),
        ('The set {1, 2} and {"name": "no call"}', None),
        ('{"name": 5, "arguments": {}}', None),
        ('{"name": "f", "arguments": "not json"}', ToolKey("f")),
        ("{" * 1000, None),
        ("no tool here", None),
        ("", None),
    ],
)  # fmt: skip
def test_what_an_answer_calls(text: str, expected: ToolKey | None) -> None:
    assert recognise_tool(text) == expected


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("ls", "ls"),
        ("/usr/bin/git status", "git"),
        ("cd a; cd b && pytest", "pytest"),
        ("cd a", "cd"),
        ("FOO=1 BAR='x y' make", "make"),
        ("sudo -n env A=1 apt-get update", "apt-get"),
        ("timeout 60 python run.py", "python"),
        ("python3 -m unittest -v", "unittest"),
        ("cat x | grep y", "cat"),
        ("# only a remark\nsed -i s/a/b/ f", "sed"),
        ("   ", None),
        ("&& ||", None),
    ],
)
def test_what_a_command_runs(command: str, word: str | None) -> None:
    assert command_word(command) == word


@given(st.text(alphabet=st.sampled_from('{}[]":,`bash\n name arguments\\'), max_size=300))
def test_no_text_makes_it_fail(text: str) -> None:
    found = recognise_tool(text)
    assert found is None or found.tool
