"""torchtitan has an environment of its own (`make test-titan`). Elsewhere these tests are not collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torchtitan") else ["*"]
