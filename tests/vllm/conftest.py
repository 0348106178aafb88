"""The random tiny Qwen3 of `zerokl init`'s preset."""

from pathlib import Path

import pytest
from zerokl.engine.initialise import random_decoder
from zerokl.engine.text import character_tokenizer
from zerokl.model.checkpoint import write_checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(root / "tokenizer")
    decoder = random_decoder("tiny", len(tokenizer), 0)
    decoder.flat.mul_(3.0)  # sharper than at initialisation: tokens that depend on their context
    write_checkpoint(root / "model", decoder.layout, decoder.flat.detach(), companions=root / "tokenizer")
    return root / "model"
