"""The messages that docs/troubleshooting.md explains are those that the code says."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("cli", "audit", "engine", "kernels", "model", "verify", "integrations")
# What another program says.
OTHERS = {"zerokl: command not found"}
# What stands for a value: ..., quoted or bracketed text, numbers, names in capitals.
_VALUE = re.compile(
    r"\.\.\.|'[^']*'|\"[^\"]*\"|\([^)]*\)|\[[^]]*\]|\b[A-Z]+\b|\bowner/name\b|\b[\d.e+-]*\d\b"
)


def messages() -> list[str]:
    """The first column's messages."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text().split("## When a run of zerokl stops")[0]
    rows = [row for row in re.findall(r"^\| (.*?) \|", page, re.M) if "`" in row]
    codes = [code for row in rows for code in re.findall(r"`([^`]+)`", row)]
    return [code for code in codes if " " in code and not code.startswith("zerokl replay")]


@pytest.fixture(scope="module")
def strings() -> str:
    """Every string of the source; where a value is put into one, a line ends."""
    texts = []
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(" ".join(node.value.split()))
    return "\n".join(texts)


def pieces(message: str) -> list[str]:
    """The parts of a message that no value stands in."""
    parts = (part.strip(" :;,`()") for part in _VALUE.split(message))
    return [part for part in parts if len(part) > 5]


@pytest.mark.parametrize("message", [m for m in messages() if m not in OTHERS])
def test_the_code_says_every_message_of_the_page(strings, message):
    assert pieces(message), message
    assert [part for part in pieces(message) if part not in strings] == []


def test_there_are_many_and_a_changed_one_is_found(strings):
    assert len(messages()) > 30
    assert any(part not in strings for part in pieces("memory has run out; take a smaller model"))
