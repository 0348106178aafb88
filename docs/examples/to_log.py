"""A run's rollouts as a log that `zerokl audit` reads: python to_log.py RUN TEMPERATURE > LOG."""

import json
import sys
from pathlib import Path

run, temperature = Path(sys.argv[1]), float(sys.argv[2])
for line in map(json.loads, (run / "rollouts.jsonl").read_text().splitlines()):
    row = {key: line[key] for key in ("prompt_ids", "completion_ids", "logprobs", "weight_version")}
    print(json.dumps(row | {"temperature": temperature}))
