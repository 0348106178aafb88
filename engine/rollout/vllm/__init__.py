"""vLLM as the sampler, through its plugin points.

The plugin points are a model, an attention backend, a logits processor and a weight transfer engine. vLLM
keeps its scheduler, paged cache, prefix cache and sampler. The arithmetic in between is ours, or that of
vLLM's own model (stock.py). Nothing of vLLM is patched.

Other packages import `sampler.py`, `stock.py`, `arguments.py` and `installed.py`. vLLM loads the other
modules by name, in whichever process it likes.
"""
