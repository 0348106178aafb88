"""These libraries have an environment of their own (`make test-worlds`); elsewhere nothing is collected."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

LIBRARIES = ("textarena", "gem", "gymnasium", "verifiers")
collect_ignore_glob = [] if all(map(find_spec, LIBRARIES)) else ["*"]


@pytest.fixture(autouse=True)
def _own_environments(monkeypatch):
    """The modules of the tests' own environments lie on the path, in every process."""
    folder = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", folder, prepend=":")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
