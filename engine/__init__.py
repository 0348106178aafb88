"""Configuration, tasks and rewards, samplers, losses, the optimizer, training, and what the commands do."""
