"""Messages of bytes between two processes. A message is its length, in eight bytes, and then its bytes.

multiprocessing's Connection waits for a whole message. Code of the user's may begin one and not end it.
"""

import select
import socket
from contextlib import suppress

_LENGTH_BYTES, _READ_BYTES = 8, 1 << 20


def is_readable(descriptor: int) -> bool:
    """Whether something has arrived, or the other end was closed."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


class Channel:
    """One of the two ends of a channel.

    timeout_s: no call waits longer; None is for ever. longest_bytes: of a message to this end; None is any.
    """

    def __init__(
        self, connection: socket.socket, timeout_s: float | None = None, longest_bytes: int | None = None
    ):
        self._socket, self._longest_bytes = connection, longest_bytes
        self._begun, self._length = bytearray(), None
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
        """Read some of a message, and nothing after it. Returns the message once it is whole.

        Raises EOFError where the other end was closed, and ValueError for a message that is too long.
        """
        wanted = _LENGTH_BYTES if self._length is None else self._length
        try:
            arrived = self._socket.recv(min(wanted - len(self._begun), _READ_BYTES))
        except OSError:
            arrived = b""
        if not arrived:
            raise EOFError
        self._begun += arrived
        if len(self._begun) < wanted:
            return None
        whole, self._begun = bytes(self._begun), bytearray()
        if self._length is not None:
            self._length = None
            return whole
        self._length = int.from_bytes(whole, "big")
        if self._longest_bytes is not None and self._length > self._longest_bytes:
            raise ValueError(f"{self._length:,} bytes; {self._longest_bytes:,} at most")
        return None

    def has_bytes(self) -> bool:
        """Whether some of a message has arrived."""
        with suppress(ConnectionResetError):
            return is_readable(self.fileno()) and bool(self._socket.recv(1, socket.MSG_PEEK))
        return False

    def close(self) -> None:
        """The other end receives no more."""
        self._socket.close()
