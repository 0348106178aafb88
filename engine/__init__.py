"""Config, tasks and rewards, samplers, losses, the learner, the training loop and reports."""
