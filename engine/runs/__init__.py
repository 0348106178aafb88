"""A run and its folder: setting up, taking the steps, checkpoints, going on after an interruption."""
