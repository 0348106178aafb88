"""A run's rollouts as a log that `zerokl audit` reads: python to_log.py RUN > LOG.

How the tokens were drawn stands in the run's own config.toml.
"""

import json
import sys
import tomllib
from pathlib import Path

run = Path(sys.argv[1])
sampling = tomllib.loads((run / "config.toml").read_text())["sampling"]
drawn_with = {key: value for key, value in sampling.items() if key != "max_tokens"}
for line in map(json.loads, (run / "rollouts.jsonl").read_text().splitlines()):
    row = {key: line[key] for key in ("prompt_ids", "completion_ids", "logprobs", "weight_version")}
    print(json.dumps(row | drawn_with))
