"""`zerokl weights`: the hashes of a model's tensors, and which tensors of two models differ.

A tensor has a hash in its own dtype and in each narrower one that it can be rounded to. So the fp32 weights
of a trainer can be compared with the bf16 weights of an engine. Values decide, names of files do not.
"""

import hashlib
import json
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ....files.dtypes import dtype_name
from ....files.http_request import is_address
from ....files.reading import read_json, shown
from ....model.checkpoint import resolve_model
from ....model.weight_files import open_tensors
from ....verify.difference import differences
from .weight_server import served_hashes

# Dtype of a tensor -> the dtypes in which it is hashed.
_HASHED = {
    torch.float64: (torch.float32, torch.bfloat16, torch.float16),
    torch.float32: (torch.float32, torch.bfloat16, torch.float16),
    torch.bfloat16: (torch.bfloat16,),
    torch.float16: (torch.float16,),
}
Hashes = dict[str, dict[str, Any]]
# Elements that are hashed at once, and the constants of splitmix64 (Steele, Lea, Flood, 2014) as int64.
_CHUNK = 1 << 22
_MIX = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


def tensor_hashes(
    tensors: Iterable[tuple[str, torch.Tensor]], unsigned_zeros: Collection[str] = ()
) -> Hashes:
    """For each tensor its shape, its dtype, and two hashes of its values in each dtype (_HASHED).

    "sha256" is of the values in their order. "unordered" is the same for every order of the values.
    unsigned_zeros: the names of those in which -0.0 counts as 0.0.
    """
    hashes = {}
    for name, stored in tensors:
        tensor = stored + 0.0 if name in unsigned_zeros else stored
        dtypes = _HASHED.get(tensor.dtype, (tensor.dtype,))
        hashes[name] = {
            "shape": list(tensor.shape),
            "dtype": dtype_name(tensor.dtype),
            "sha256": {dtype_name(dtype): _sha256(tensor.detach().to(dtype)) for dtype in dtypes},
            "unordered": {dtype_name(dtype): _unordered(tensor.detach().to(dtype)) for dtype in dtypes},
        }
    return hashes


def _sha256(tensor: torch.Tensor) -> str:
    # A matrix of 16-bit numbers has no numpy dtype, so its bytes are read.
    return hashlib.sha256(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy()).hexdigest()


def _unordered(tensor: torch.Tensor) -> str:
    """The sum, modulo 2^64, of a hash of each element's bits (splitmix64), as 16 hexadecimal digits."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    total = 0
    for chunk in tensor.contiguous().cpu().reshape(-1).view(integers).split(_CHUNK):
        z = chunk.to(torch.int64) + _MIX[0]
        for shift, factor in ((30, _MIX[1]), (27, _MIX[2])):
            z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * factor
        total += int((z ^ ((z >> 31) & ((1 << 33) - 1))).sum())
    return f"{total % (1 << 64):016x}"


def read_both(a: str, b: str) -> tuple[Hashes, Hashes]:
    """As `read_hashes`, of two models that are compared.

    What an engine could only read without the signs of zeros is read so from files, too.
    """
    first = read_hashes(a)
    second = read_hashes(b, _unsigned_zeros(first))
    if names := _unsigned_zeros(second) - _unsigned_zeros(first):
        first = read_hashes(a, names)
    return first, second


def _unsigned_zeros(hashes: Hashes) -> set[str]:
    return {name for name, row in hashes.items() if row.get("unsigned_zeros")}


def read_hashes(source: str, unsigned_zeros: Collection[str] = ()) -> Hashes:
    """The hashes of a model folder, a hub name, a safetensors file, a JSON file of hashes, or a server.

    unsigned_zeros: as for `tensor_hashes`. Raises ValueError for what is none of these.
    """
    if is_address(source):
        return _checked(served_hashes(source), source)
    path = Path(source)
    if path.suffix == ".json" and path.is_file():
        return _stored(path)
    files = [path] if path.is_file() else sorted(resolve_model(source).glob("*.safetensors"))
    if not files:
        raise ValueError(f"weights: {source} holds no .safetensors file")
    return tensor_hashes(_tensors(files), unsigned_zeros)


def _tensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        try:
            with open_tensors(file) as stored:
                names = stored.keys()
                for name in names:
                    yield name, stored.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"weights: {file} is no safetensors file, or incomplete ({error})") from None


def _stored(path: Path) -> Hashes:
    try:
        return _checked(read_json(path)["tensors"], str(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"weights: {path} is no file of hashes ({shown(str(error))})") from None


def _checked(hashes: Any, source: str) -> Hashes:
    """The hashes that a file or a server gave. Raises ValueError for what are none."""
    try:
        for row in hashes.values():
            if not isinstance(row["sha256"], dict) or not isinstance(row["shape"], list):
                raise TypeError("a tensor has no hashes or no shape")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"weights: {source} gives no hashes ({shown(str(error))})") from None
    return hashes


def vocab_size(hashes: Hashes) -> int:
    """The rows of the embedding. Raises ValueError where none is among the tensors."""
    for name, row in hashes.items():
        if name.endswith("embed_tokens.weight"):
            return row["shape"][0]
    raise ValueError("weights: no tensor is called embed_tokens.weight, so no prompt can be made")


def write_hashes(hashes: Hashes, path: Path) -> None:
    """Write hashes as JSON. Raises ValueError where the file exists."""
    if path.exists():
        raise ValueError(f"weights: {path} exists already; choose another --out")
    path.write_text(json.dumps({"tensors": hashes}, indent=1) + "\n")


def compare_hashes(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """One line for each tensor that differs; empty where both models are equal."""
    names, lines = _names_by_hash(b), []
    for d in differences(a, b, operator.is_):  # two rows are never one object, so each pair is looked at
        x, y = d.values
        if d.missing is None:
            words = _difference(d.quantity, x, y, names)
        else:  # tied to the embedding, or a buffer
            may_lack = d.quantity == "lm_head.weight" or (d.missing == 1 and not x["shape"])
            words = "" if may_lack else d.one_sided
        lines += [f"{d.quantity}: {words}"] if words else []
    return lines


def _difference(name: str, x: Mapping[str, Any], y: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """How two tensors of one name differ; empty where they are equal in every dtype that both have."""
    if x["shape"] != y["shape"]:
        return f"shape {x['shape']} and {y['shape']}"
    shared = [dtype for dtype in x["sha256"] if dtype in y["sha256"]]
    if not shared:
        return f"{x['dtype']} and {y['dtype']} have no dtype in common"
    if any(x["sha256"][dtype] == y["sha256"][dtype] for dtype in shared):
        widest = shared[0]
        if x["sha256"][widest] == y["sha256"][widest]:
            return ""
        equal = next(d for d in shared if x["sha256"][d] == y["sha256"][d])
        return f"equal only once both are rounded to {equal}"
    for dtype in shared:
        other = names.get(x["sha256"][dtype])
        if other not in (None, name):
            return f"the first holds what the second has as {other}"
    orders = [side.get("unordered", {}) for side in (x, y)]
    if any(dtype in orders[0] and orders[0][dtype] == orders[1].get(dtype) for dtype in shared):
        return "the same values in another order (another layout, or experts or rows that were swapped)"
    return "other values"


def _names_by_hash(hashes: Mapping[str, Any]) -> dict[str, str]:
    """The first tensor that has a hash."""
    names: dict[str, str] = {}
    for name, row in hashes.items():
        for digest in row["sha256"].values():
            names.setdefault(digest, name)
    return names
