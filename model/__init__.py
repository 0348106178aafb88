"""One decoder on our kernels, its families and their blocks, its cache, and Hugging Face checkpoints."""
