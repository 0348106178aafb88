"""Models of random weights for benchmarks, with a tokenizer of characters."""

from pathlib import Path


def make_model(preset: str, folder: Path) -> None:
    """Write a model of one of `zerokl init`'s presets to FOLDER/PRESET."""
    from zerokl.engine.runs.init import random_decoder
    from zerokl.engine.tasks.tokenizer import character_tokenizer
    from zerokl.model.checkpoint_writing import write_checkpoint

    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    decoder = random_decoder(preset, len(tokenizer), 0)
    flat = decoder.flat.detach()
    write_checkpoint(folder / preset, decoder.layout, flat, companions=folder / "tokenizer")
