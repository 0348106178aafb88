"""The safetensors files of a model's folder: which there are, which tensors are read from each, and reading.

Pickled weights are not read, because loading them can run code.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..files.inputs import check_input
from ..files.reading import read_json, shown
from .mxfp4 import BLOCKS, SCALES, dequantised, dequantised_shape

# Names the file of each weight, where they lie in several.
INDEX = "model.safetensors.index.json"
# Names of files of weights.
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "consolidated*.pth", "*.gguf", "*.h5", "*.msgpack")


def tensor_files(folder: Path) -> dict[str, list[str]]:
    """The names of the tensors in each safetensors file of a folder, by file name. Raises ValueError."""
    names_of: dict[str, list[str]] = {file: [] for file in weight_files(folder)}
    for tensor in stored_tensors(folder):
        names_of[tensor.path.name].append(tensor.name)
    return names_of


def weight_files(folder: Path) -> dict[str, list[str] | None]:
    """The names of the tensors to read from each file, by file name; None is all of them."""
    index = folder / INDEX
    if index.exists():
        if (folder / "model.safetensors").exists():
            raise ValueError(
                f"model: {folder} holds model.safetensors and {index.name}, and libraries differ in which "
                "they read; remove the stale one"
            )
        try:
            file_of = dict(read_json(index)["weight_map"].items())
            if not all(isinstance(file, str) for file in file_of.values()):
                raise TypeError("a file's name is not a string")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"model: {index} is not a valid index of safetensors shards ({shown(str(error))})"
            ) from None
        if outside := [file for file in file_of.values() if not _is_plain_name(file)]:
            raise ValueError(
                f"model: {index} names the file {shown(outside[0])}; a shard must lie beside its index"
            )
        return {
            file: [name for name, its_file in file_of.items() if its_file == file]
            for file in dict.fromkeys(file_of.values())
        }
    if not (folder / "model.safetensors").exists():
        raise ValueError(
            f"model: {folder} holds no model.safetensors (pickled weights are not read: loading them can run "
            "code); save_pretrained of transformers writes it"
        )
    return {"model.safetensors": None}


def _is_plain_name(file: str) -> bool:
    """Whether a name is of a file in the same folder."""
    return file not in ("", ".", "..") and not set(file) & {"/", "\\", "\0"}


@contextmanager
def open_tensors(path: str | Path) -> Iterator[Any]:
    """A safetensors file, opened for reading into torch. Raises OSError and SafetensorError."""
    check_input(path)
    with safe_open(path, framework="pt") as stored:
        yield stored


@contextmanager
def _corrupt_is_refused(path: Path) -> Iterator[None]:
    """Raise ValueError for what goes wrong because a safetensors file is missing or corrupt."""
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"model: {path} is missing, though the folder's index names it") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"model: {path} is corrupt or incomplete ({error})") from None


_TEXT_OF_BOTH = "model.language_model."


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file that is open."""

    path: Path  # of the file
    stored_as: str  # its name there
    file: Any  # as safe_open gives it

    @property
    def name(self) -> str:
        """Its name in a text model. Those of a model of text and images begin otherwise."""
        text = self.stored_as.removeprefix(_TEXT_OF_BOTH)
        return self.stored_as if text == self.stored_as else f"model.{text}"

    def read(self) -> torch.Tensor:
        """The tensor. Raises ValueError for a corrupt file."""
        with _corrupt_is_refused(self.path):
            return self.file.get_tensor(self.stored_as)

    def part(self) -> Any:
        """As safetensors' get_slice: dtype and shape, and rows on demand. Raises ValueError."""
        with _corrupt_is_refused(self.path):
            return self.file.get_slice(self.stored_as)


@dataclass(frozen=True)
class Mxfp4Tensor(StoredTensor):
    """A tensor that is stored as MXFP4 blocks (mxfp4.py). Its scales may lie in another file."""

    scales: Path

    @property
    def name(self) -> str:
        return super().name.removesuffix(BLOCKS)

    def read(self) -> torch.Tensor:
        return self[:]

    def part(self) -> "Mxfp4Tensor":
        return self

    def get_shape(self) -> tuple[int, ...]:
        """[E, K, N]."""
        with self._both() as (blocks, scales):
            return dequantised_shape(blocks.get_shape(), scales.get_shape())

    def get_dtype(self) -> str:
        """That of the numbers, as safetensors names it."""
        return "BF16"

    def __getitem__(self, experts: slice) -> torch.Tensor:
        with self._both() as (blocks, scales):
            return dequantised(blocks[experts], scales[experts])

    @contextmanager
    def _both(self) -> Iterator[tuple[Any, Any]]:
        """Blocks and scales, as get_slice gives them. Raises ValueError, also for what is done with them."""
        name = self.stored_as.removesuffix(BLOCKS) + SCALES
        with _corrupt_is_refused(self.scales), open_tensors(self.scales) as file:
            scales = file.get_slice(name)
            try:
                yield super().part(), scales
            except ValueError as error:
                raise ValueError(f"model: {self.path}: {self.stored_as}: {error}") from None


def stored_tensors(folder: Path) -> Iterator[StoredTensor]:
    """Every tensor of a folder, file by file. It can be read until the next one. Raises ValueError.

    Blocks and scales of MXFP4 are one tensor, that of their numbers.
    """
    files = weight_files(folder)
    for file, listed in files.items():
        with _opened(folder / file, listed) as (stored, names):
            names = list(names)
            file_of = {name: other for other, listed in files.items() for name in listed or names}
            for name in names:
                yield from _stored_tensor(folder / file, name, stored, file_of)


def _stored_tensor(path: Path, name: str, stored: Any, file_of: Mapping[str, str]) -> Iterator[StoredTensor]:
    """The tensor of this name; none of MXFP4's scales, which their blocks read."""
    scales = name.removesuffix(BLOCKS) + SCALES
    if name.endswith(BLOCKS) and scales in file_of:
        yield Mxfp4Tensor(path, name, stored, path.with_name(file_of[scales]))
    elif not name.endswith(SCALES) or name.removesuffix(SCALES) + BLOCKS not in file_of:
        yield StoredTensor(path, name, stored)


@contextmanager
def _opened(path: Path, names: list[str] | None) -> Iterator[tuple[Any, Iterable[str]]]:
    """A safetensors file, opened, and the names of the tensors to read from it (names: see weight_files)."""
    with _corrupt_is_refused(path), open_tensors(path) as stored:
        if names is not None and (left := set(stored.keys()) - set(names)):
            raise ValueError(
                f"model: {path} holds {min(left)[:200]}, which the folder's index does not name there; "
                "other libraries read all of a shard"
            )
        yield stored, stored.keys() if names is None else names


def unread_files(folder: Path) -> list[str]:
    """The names of files of weights beside those that are read, in the folder itself.

    An engine may prefer them, and they may be of another step. Raises ValueError (see weight_files).
    """
    read = weight_files(folder)
    return sorted(f.name for pattern in _WEIGHTS for f in folder.glob(pattern) if f.name not in read)
