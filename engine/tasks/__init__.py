"""Tasks, their rewards, and the processes in which code of the user's computes rewards."""
