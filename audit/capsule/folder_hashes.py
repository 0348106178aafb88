"""The hashes of a model's folder: of each tensor's bytes, and of the files that decide what is computed.

It reads the safetensors format itself (an 8-byte length, a JSON header, the bytes), so it needs no torch.
"""

import hashlib
from pathlib import Path
from typing import BinaryIO

from ...files.inputs import InputError, open_input
from ...files.reading import parse_json
from ...files.writing import hash_json
from ...verify.difference import differences

# Bytes that are hashed at once, and those of a header at most: 100 MB is safetensors' own limit.
_CHUNK, _HEADER = 1 << 20, 100_000_000
# Files beside the weights that decide a number or an id.
_FILES = ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja")
# Tensors whose hashes a capsule lists; of more it has the hash over all.
MOST_TENSORS = 4096


def weight_hashes(folder: Path) -> dict[str, str]:
    """Name of each tensor -> "DTYPE SHAPE SHA-256". Raises ValueError for a folder without safetensors."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"capsule: {folder} holds no .safetensors file; name a model's folder with --model")
    hashes: dict[str, str] = {}
    for file in files:
        try:
            with open_input(file) as handle:
                hashes |= _hashes(handle)
        except InputError as error:
            raise ValueError(f"capsule: {file} {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"capsule: {file} is no safetensors file, or incomplete ({error})") from None
    return dict(sorted(hashes.items()))


def _hashes(handle: BinaryIO) -> dict[str, str]:
    length = int.from_bytes(handle.read(8), "little")
    if not 2 <= length <= _HEADER:
        raise ValueError(f"a header of {length:,} bytes")
    header = parse_json(handle.read(length))
    hashes = {}
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        begin, end = tensor["data_offsets"]
        handle.seek(8 + length + begin)
        shape = "x".join(map(str, tensor["shape"])) or "scalar"
        hashes[name] = f"{tensor['dtype']} {shape} {_sha256(handle, end - begin)}"
    return hashes


def _sha256(handle: BinaryIO, left: int) -> str:
    digest = hashlib.sha256()
    while left > 0:
        chunk = handle.read(min(left, _CHUNK))
        if not chunk:
            raise ValueError("the bytes of a tensor are missing")
        digest.update(chunk)
        left -= len(chunk)
    return digest.hexdigest()


def hash_of_all(hashes: dict[str, str]) -> str:
    """One SHA-256 over the hashes of all tensors."""
    return hash_json(hashes)


def file_hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file beside the weights that decides a number or an id."""
    hashes = {}
    for name in _FILES:
        if (folder / name).is_file():
            with open_input(folder / name) as handle:
                hashes[name] = _sha256(handle, (folder / name).stat().st_size)
    return hashes


def model_differences(
    then: dict[str, str], then_all: str, now: dict[str, str], files: dict[str, str], files_now: dict[str, str]
) -> list[str]:
    """What differs between two models, one line each; empty where nothing does."""
    lines = []
    if then and then_all != hash_of_all(now):
        unequal = [d.quantity for d in differences(then, now)]
        first = ", ".join(unequal[:3]) + (", ..." if len(unequal) > 3 else "")
        lines = [f"weights: {len(unequal)} of {len(then)} tensors differ ({first})"]
    elif then_all != hash_of_all(now):
        lines = ["weights: they differ"]
    for d in differences(files, files_now):
        lines.append(f"{d.quantity}: {d.one_sided}" if d.one_sided else f"{d.quantity} differs")
    return lines
