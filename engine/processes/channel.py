"""Messages of bytes between two processes. A message is its length, in eight bytes, and then its bytes.

multiprocessing's Connection waits for a whole message. Code of the user's may begin one and not end it.
"""

import os
import select
import socket

_LENGTH_BYTES, _READ_BYTES = 8, 1 << 16


def is_readable(descriptor: int) -> bool:
    """Whether something has arrived, or the other end was closed."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


class Channel:
    """One of the two ends of a channel.

    timeout_s: no message to the other end waits longer; None is for ever. longest_bytes: of a message to this
    end; None is any. reads_ahead: whether bytes after a message may be read with it.
    """

    def __init__(
        self,
        connection: socket.socket,
        timeout_s: float | None = None,
        longest_bytes: int | None = None,
        reads_ahead: bool = True,
    ):
        self._socket, self._longest_bytes, self._reads_ahead = connection, longest_bytes, reads_ahead
        self._arrived = bytearray()
        connection.settimeout(timeout_s)

    def fileno(self) -> int:
        """The number of its descriptor, which can be waited for."""
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Raises OSError where the other end was closed, or does not read in time."""
        self._socket.sendall(len(message).to_bytes(_LENGTH_BYTES, "big") + message)

    def receive(self) -> bytes:
        """The next message. Raises EOFError where the other end was closed."""
        while (message := self.part()) is None:
            pass
        return message

    def part(self) -> bytes | None:
        """The next message; or where it has not arrived as a whole, read some of it, and return None.

        Raises EOFError where the other end was closed, and ValueError for a message that is too long.
        """
        missing = self._missing()
        if missing > 0:
            try:
                arrived = os.read(self.fileno(), max(missing, _READ_BYTES) if self._reads_ahead else missing)
            except ConnectionResetError:
                arrived = b""
            if not arrived:
                raise EOFError
            self._arrived += arrived
            if self._missing() > 0:
                return None
        end = _LENGTH_BYTES + self._length()
        message, self._arrived = bytes(self._arrived[_LENGTH_BYTES:end]), self._arrived[end:]
        return message

    def _length(self) -> int:
        return int.from_bytes(self._arrived[:_LENGTH_BYTES], "big")

    def _missing(self) -> int:
        """The bytes that the next message lacks, those of its length first."""
        if len(self._arrived) < _LENGTH_BYTES:
            return _LENGTH_BYTES - len(self._arrived)
        length = self._length()
        if self._longest_bytes is not None and length > self._longest_bytes:
            raise ValueError(f"{length:,} bytes; {self._longest_bytes:,} at most")
        return _LENGTH_BYTES + length - len(self._arrived)

    @property
    def has_more(self) -> bool:
        """Whether bytes were read after the last message."""
        return bool(self._arrived)

    def close(self) -> None:
        """The other end receives no more."""
        self._socket.close()
