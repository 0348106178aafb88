"""Signatures by SSH keys, made and checked by ssh-keygen (OpenSSH 8.2 or later).

Users have such keys, agents and hardware keys hold them, and forges publish the public ones. So neither a
library nor a directory of keys is needed.
"""

import base64
import subprocess
from pathlib import Path

from ....files.inputs import read_bytes
from ....files.reading import one_line

# A signature is of a purpose: one that was made for another cannot be taken for ours.
_NAMESPACE = "zerokl-attest"
SUFFIX = ".sig"
# Characters of a line of a signature's base64.
_WIDTH = 70


class SignatureError(ValueError):
    """A signature that is not what it should be."""


def sign(file: Path, key: Path) -> None:
    """Write FILE.sig. key: a private SSH key, or a public one whose private key an agent holds.

    Raises ValueError where ssh-keygen refuses it.
    """
    process = _run(["sign", "-f", str(key), "-n", _NAMESPACE, str(file)])
    if process.returncode or not file.with_name(file.name + SUFFIX).is_file():
        raise ValueError(f"attest: --key ({key}) cannot sign ({_reason(process)})")


def check_signature(file: Path, signers: Path | None) -> str:
    """Who signed a file, in words. signers: a file of allowed signers, as ssh-keygen(1) has it.

    Without it only the key is known, by its fingerprint. Raises SignatureError, and ValueError where there is
    no such file.
    """
    signature = file.with_name(file.name + SUFFIX)
    if signers is not None and not signers.is_file():
        raise ValueError(f"attest: --signers ({signers}) is no file")
    if not signature.is_file() or not _is_canonical(read_bytes(signature)):
        raise SignatureError(f"{signature.name} is not there, or not as ssh-keygen writes it")
    content = read_bytes(file)
    if signers is None:
        process = _run(["check-novalidate", "-n", _NAMESPACE, "-s", str(signature)], content)
        if process.returncode:
            raise SignatureError(f"is not of these bytes ({_reason(process)})")
        return _key(process)
    principals = _run(["find-principals", "-s", str(signature), "-f", str(signers)])
    names = principals.stdout.decode(errors="replace").split("\n")
    if principals.returncode or not names[0]:
        raise SignatureError(f"is by no signer of {signers} ({_reason(principals)})")
    words = ["verify", "-f", str(signers), "-I", names[0], "-n", _NAMESPACE, "-s", str(signature)]
    process = _run(words, content)
    if process.returncode:
        raise SignatureError(f"is not of these bytes, or not by {one_line(names[0])} ({_reason(process)})")
    return f"{one_line(names[0])}, {_key(process)}"


def _is_canonical(armor: bytes) -> bool:
    """Whether a signature has the one form that ssh-keygen writes, which its readers are not strict about."""
    lines = armor.split(b"\n")
    try:
        blob = base64.b64encode(base64.b64decode(b"".join(lines[1:-2]), validate=True))
    except ValueError:
        return False
    wrapped = [blob[i : i + _WIDTH] for i in range(0, len(blob), _WIDTH)]
    return lines == [b"-----BEGIN SSH SIGNATURE-----", *wrapped, b"-----END SSH SIGNATURE-----", b""]


def _run(words: list[str], content: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["ssh-keygen", "-Y", *words], input=content, capture_output=True, check=False)
    except FileNotFoundError:
        raise ValueError(
            "attest: ssh-keygen is not installed; install OpenSSH's client, 8.2 or later"
        ) from None


def _reason(process: subprocess.CompletedProcess[bytes]) -> str:
    """The last line that ssh-keygen printed."""
    lines = (process.stderr + process.stdout).decode(errors="replace").strip().splitlines()
    return one_line(lines[-1]) if lines else "ssh-keygen said nothing"


def _key(process: subprocess.CompletedProcess[bytes]) -> str:
    """The key that ssh-keygen names: "ED25519 key SHA256:..."."""
    words = process.stdout.decode(errors="replace").strip().partition(" with ")[2]
    return one_line(words) or "a key that ssh-keygen does not name"
