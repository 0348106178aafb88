"""vLLM as the sampler, through its plugin points: a model, an attention backend, a logits processor and a
weight transfer engine.

vLLM keeps its scheduler, paged cache, prefix cache and sampler; the arithmetic in between is ours, or
(stock.py) its own model's. Nothing of vLLM is patched. Only `sampler.py` and `stock.py` (vLLM's own model)
are meant to be imported from elsewhere; vLLM loads the other modules by name, in whichever process it likes.
"""
