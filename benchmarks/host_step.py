"""What the host takes of a step's ledger and of its update on a GPU, measured without a GPU.

    python -m zerokl.benchmarks.host_step                       # this version
    python -m zerokl.benchmarks.host_step --beside FOLDER       # by turns with the checkout in FOLDER

The model is the 0.6B in bf16. A GPU makes the digests of its blocks and the sums of the gradient's squares.
Here they are random numbers, and the host's part is the real one. The other version is loaded beside this one
in the same process. It must come to the same trees and the same norm.
"""

import argparse
import importlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from zerokl.benchmarks.machine import SHAPES, shape_config
from zerokl.engine.train.parallel.process_group import ALONE
from zerokl.model.weights import FLAT_TILE, Layout

VOCABULARY = 151936


def _package(folder: Path) -> str:
    """The name under which the checkout in `folder` is imported. Its modules import each other relatively."""
    name = "zerokl_beside"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    sys.modules[name] = importlib.util.module_from_spec(spec)
    return name


def ledger(package: str, layout: Layout) -> Callable[[], list[str]]:
    """The roots of a step's trees: gradient, optimizer state, master weights and compute weights."""
    tree_hash = importlib.import_module(f"{package}.engine.train.parallel.tree_hash")
    wide, narrow = torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    digests = torch.randint(-(1 << 62), 1 << 62, (len(layout.blocks), 2), generator=generator)
    as_on_a_gpu = {"on_triton": lambda x: True, "block_digests": lambda x, blocks: digests}

    def roots() -> list[str]:
        quantities = ((wide,), (wide, wide), (wide,), (narrow,))
        with patch.multiple(tree_hash, **as_on_a_gpu):
            return [tree_hash.hash_tree(layout.blocks, *tensors).root for tensors in quantities]

    return roots


def norm(package: str, layout: Layout) -> Callable[[], float]:
    """The gradient's norm from one number for each row, in the slices of a GPU."""
    module = importlib.import_module(f"{package}.engine.train.optimizer")
    rows = torch.randn(-(-layout.numel // FLAT_TILE), generator=torch.Generator().manual_seed(0))
    slices = SimpleNamespace(own=slice(0, len(rows)), ranks=ALONE)
    elements, cpu = module.GPU_SLICE // FLAT_TILE, torch.device("cpu")
    optimizer = SimpleNamespace(slices=slices, _slice=elements, _device=cpu)

    def of_rows() -> float:
        with patch.object(module, "FLAT_TILE", 1):
            return module.Optimizer._norm(optimizer, rows)

    return of_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--beside", type=Path, help="a checkout of another version")
    parser.add_argument("--turns", type=int, default=31)
    options = parser.parse_args()
    torch.set_num_threads(1)
    layout = Layout(shape_config(SHAPES["0.6B"], VOCABULARY))
    packages = {"this version": "zerokl"}
    if options.beside:
        packages["beside it"] = _package(options.beside)
    report: dict[str, Any] = {
        "what": f"host ms of a step, {len(layout.blocks)} blocks",
        "torch": torch.__version__,
    }
    for part in (ledger, norm):
        works = {name: part(package, layout) for name, package in packages.items()}
        times: dict[str, list[float]] = {name: [] for name in works}
        for turn in range(options.turns + 1):  # the first makes what is kept
            results = []
            for name, work in works.items():
                began = time.perf_counter()
                results.append(work())
                if turn:
                    times[name].append(1000 * (time.perf_counter() - began))
            assert all(result == results[0] for result in results), f"{part.__name__}: other bits"
        report[part.__name__] = {name: round(statistics.median(x), 1) for name, x in times.items()}
        ratios = [times["this version"][i] / x for i, x in enumerate(times.get("beside it", ()))]
        if ratios:
            report[part.__name__]["ratio of a turn"] = round(statistics.median(ratios), 2)
    print(json.dumps(report | {"torch": torch.__version__}, indent=1))


if __name__ == "__main__":
    main()
