"""PEFT has an environment of its own (`make test-peft`). Elsewhere these tests are not even collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("peft") else ["test_*.py"]
