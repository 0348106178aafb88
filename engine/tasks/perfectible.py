"""What a model folder says of the task it was made for:

its options, and the problems that are worth training on.
"""

import json
from pathlib import Path
from typing import Any

# Written by `zerokl init`: the task, its options, and the prompts that the model solves sometimes but not
# always.
PERFECTIBLE_FILE = "perfectible.json"
# In the checkpoints of a run: the task and its options.
TASK_FILE = "task.json"


def perfectible_set(model: Path) -> dict[str, Any] | None:
    """What `initialise` left in a model folder, or None. Raises ValueError when it is not readable."""
    found = _read_task(model / PERFECTIBLE_FILE)
    if found is not None and not (
        isinstance(found.get("prompts"), list) and all(isinstance(p, str) for p in found["prompts"])
    ):
        raise ValueError(f"model: {model / PERFECTIBLE_FILE} holds no list of prompts")
    return found


def task_of(model: Path) -> dict[str, Any] | None:
    """The task a model folder was trained or initialised on, with its options, or None.

    Raises ValueError when not readable.
    """
    return _read_task(model / TASK_FILE) or _read_task(model / PERFECTIBLE_FILE)


def _read_task(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found | {"task": str(found["task"]), "options": dict(found["options"])}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"model: {path} is not readable ({error})") from None
