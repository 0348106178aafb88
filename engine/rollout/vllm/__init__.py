"""vLLM as the sampler, through its plugin points.

The plugin points are a model, an attention backend, a logits processor and a weight transfer engine. vLLM
keeps its scheduler, paged cache, prefix cache and sampler. The arithmetic in between is ours, or that of
vLLM's own model (exact.py). Nothing of vLLM is patched. vLLM as it comes (generator.py) uses none of them.

Other packages import `sampler.py`, `exact.py`, `generator.py`, `arguments.py` and `installed.py`. vLLM loads
the other modules by name, in whichever process it likes.
"""
