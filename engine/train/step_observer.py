"""Observers of a training step (see train_step): what they are shown, and when."""

from typing import Protocol

import torch

from ...model.context import Hook


class StepObserver(Protocol):
    """Is shown what a step computes in this process. It decides no bit."""

    def forward(self, update: int, ids: torch.Tensor, places: torch.Tensor, predicting: torch.Tensor) -> Hook:
        """Called before each forward of an update. Returns the hook of this forward.

        update: counts from 0 within the step. ids [T]: the inputs. places [T, 3]: prompt, sample and position
        of each row. A prompt that is read once for several samples has the first of them. predicting [C]: the
        rows from which a drawn token is predicted, in ascending order; a prompt's forward has none. Which
        rows share a forward depends on settings that decide no bit, so the order of the calls does as well.

        The hook is called once for each operation with its name and its output [T, ...], padding left out
        (model/operations.py; some are computed as one). The last is `logprob` [C] of the drawn tokens.
        Prompts end with the last layer's keys and values.
        """
        ...

    def updated(self, update: int, gradient: torch.Tensor) -> None:
        """Called after each update of the weights.

        gradient [numel] fp32: of the loss, without a loss scale. It is valid during this call.
        """
        ...
