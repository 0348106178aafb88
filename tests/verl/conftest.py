"""verl has an environment of its own (`make test-verl`). Elsewhere these tests are not even collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("verl") else ["*"]
