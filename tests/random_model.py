"""A checkpoint of random weights, as `zerokl init` would write it before any training."""

from pathlib import Path

import pytest
from zerokl.engine.runs import init as initialise
from zerokl.engine.tasks.tokenizer import character_tokenizer
from zerokl.model.checkpoint import write_checkpoint


def random_model(root: Path, widths: dict[str, int], sharper: float = 1.0) -> Path:
    """The folder, below `root`, of a Qwen3 of these widths with the character tokenizer, its weights times
    `sharper`.
    """
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(root / "tokenizer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(initialise.PRESETS, "test", widths)
        decoder = initialise.random_decoder("test", len(tokenizer), 0)
    decoder.flat.mul_(sharper)
    write_checkpoint(root / "model", decoder.layout, decoder.flat.detach(), companions=root / "tokenizer")
    return root / "model"
