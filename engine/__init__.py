"""Config, tasks and rewards, samplers, losses, the optimizer, the training loop and reports."""
