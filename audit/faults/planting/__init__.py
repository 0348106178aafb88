"""Where faults are planted: a model of transformers that draws, another one that scores, and their logs."""
