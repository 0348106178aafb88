"""A process that has lost its parent ends itself: a run must not go on where nobody waits for it.

A cell of an ablation that outlived it would be found being written to when the ablation is started again.
Ranks that outlive torchrun wait for each other, for up to half an hour, and hold the run's folder.
"""

import os
import threading
import time

# How often the parent is looked for, in seconds.
_POLL_S = 0.25


def end_with(parent: int) -> None:
    """End this process soon after the process `parent`, whose child it is, was killed."""
    threading.Thread(target=_wait_for_the_end_of, args=(parent,), daemon=True).start()


def _wait_for_the_end_of(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)
