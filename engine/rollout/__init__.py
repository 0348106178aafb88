"""Everything that draws or scores tokens: the native sampler, vLLM, transformers."""
