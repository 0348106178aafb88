"""TRL has an environment of its own (`make test-trl`). Elsewhere these tests are not even collected."""

from importlib.util import find_spec

collect_ignore_glob = (
    [] if find_spec("trl") else [f"test_{name}.py" for name in ("record", "exact", "async", "vllm")]
)
