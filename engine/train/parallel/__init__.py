"""Workers and ranks, and what is spread over them: shards, gradients, optimizer state, scores."""
