"""The engines that an audit compares: ours, transformers, vLLM."""
