"""A small file of tokens and log-probabilities, with which an engine is asked again later."""
