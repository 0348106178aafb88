"""Which of the two distributions is installed here, and one line where something of the other is asked for.

`zerokl` holds everything. `zerokl-audit` holds the audit, and what the audit computes with, in the same
package and with the same bytes (wheels/audit/). It does not depend on torch.
"""

from importlib.util import find_spec

# What a model computes with. `zerokl` depends on both, `zerokl-audit` does not.
_COMPUTES = ("torch", "transformers")
# No package index has either distribution.
INSTALL_ZEROKL = "install zerokl, from its wheel or in its checkout: python -m pip install ."


def has_trainer() -> bool:
    """Whether the files that train are here: this is `zerokl`, and not `zerokl-audit` alone."""
    return find_spec("..engine.train", __package__) is not None


def needs_trainer(what: str) -> None:
    """Raise ValueError where only `zerokl-audit` is here. what: it begins the message, such as "diff: runs".

    An import that follows a call of this in the same block is one that `zerokl-audit` need not have.
    """
    if not has_trainer():
        raise ValueError(f"{what}: zerokl-audit, installed here, does not have it; {INSTALL_ZEROKL}")


def needs_torch(what: str) -> None:
    """Raise ValueError where a model cannot compute, because torch or transformers is missing."""
    missing = [name for name in _COMPUTES if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"{what}: a model computes here, and {' and '.join(missing)} "
            f"{'are' if len(missing) > 1 else 'is'} not installed; pip install {' '.join(missing)}"
        )


def check_together() -> None:
    """Raise ValueError where both distributions are installed and are not one version of the same files.

    With one version they share files with the same bytes, so either order of installation works.
    """
    whole, audit = installed_version("zerokl"), installed_version("zerokl-audit")
    if whole is None or audit is None:
        return
    if whole != audit or not has_trainer():
        reason = f"are of versions {whole} and {audit}" if whole != audit else "lie in two folders"
        raise ValueError(
            f"zerokl and zerokl-audit share their files, and here they {reason}; "
            "pip uninstall zerokl-audit, then, in the checkout, pip install --force-reinstall --no-deps ."
        )


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    # Each process of a reward imports zerokl, and this would be a third of its start.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
