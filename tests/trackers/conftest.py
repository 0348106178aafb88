"""The trackers have an environment of their own (`make test-trackers`); elsewhere nothing is collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("wandb") and find_spec("trackio") and find_spec("mlflow") else ["*"]
