"""Names of the files in a run's folder that others than the run look for. It loads nothing."""

LEDGER = "ledger.jsonl"
