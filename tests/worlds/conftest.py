"""These libraries have an environment of their own (`make test-worlds`); elsewhere nothing is collected."""

from importlib.util import find_spec

LIBRARIES = ("textarena", "gem", "gymnasium", "verifiers")
collect_ignore_glob = [] if all(map(find_spec, LIBRARIES)) else ["*"]
