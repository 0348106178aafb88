"""One decoder family (Qwen3, Qwen2, Llama) built from the kernels, its cache, and Hugging Face checkpoints."""
