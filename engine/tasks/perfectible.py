"""The files in a model folder that name its task: options, and the problems that are worth training on."""

from pathlib import Path
from typing import Any

from ...files.reading import read_json

# `zerokl init` writes it: the task, its options, and the prompts that the model solves sometimes but not
# always.
PERFECTIBLE_FILE = "perfectible.json"
# A run writes it to its checkpoints: the task and its options.
TASK_FILE = "task.json"


def perfectible_set(model: Path) -> dict[str, Any] | None:
    """The content of a model folder's PERFECTIBLE_FILE, or None without one.

    Raises ValueError when it is not readable.
    """
    content = _read_task(model / PERFECTIBLE_FILE)
    if content is not None and not (
        isinstance(content.get("prompts"), list) and all(isinstance(p, str) for p in content["prompts"])
    ):
        raise ValueError(f"model: {model / PERFECTIBLE_FILE} holds no list of prompts")
    return content


def task_of(model: Path) -> dict[str, Any] | None:
    """The task that a model was trained on, or made for, with its options; None where no file names one.

    Raises ValueError when a file is not readable.
    """
    return _read_task(model / TASK_FILE) or _read_task(model / PERFECTIBLE_FILE)


def _read_task(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        content = read_json(path)
        return content | {"task": str(content["task"]), "options": dict(content["options"])}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"model: {path} is not readable ({error})") from None
