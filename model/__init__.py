"""One decoder family (Qwen3, Qwen2, Llama) on our kernels, its cache, and Hugging Face checkpoints."""
