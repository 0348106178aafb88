"""Files that hold pickled objects. Loading one runs the code in it, so zerokl loads none."""


class PickledError(ValueError):
    """A file that its own framework should open. `zerokl convert` prints the script for it."""

    def __init__(self, reason: str, remedy: str, writer: str = "") -> None:
        """reason: why zerokl does not open it. remedy: the command that prints the script.

        writer: the framework that wrote it, where the file tells.
        """
        super().__init__(f"{reason}; {remedy}")
        self.reason, self.writer = reason, writer
