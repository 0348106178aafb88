"""A request to a server over HTTP, whose answer is read safely."""

from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from .reading import one_line

# The most bytes of an answer, and seconds that it may take.
ANSWER_BYTES = 256 << 20
_ANSWER_S = 600.0


def is_address(source: str) -> bool:
    """Whether it is of a server, not of a file or a folder."""
    return source.startswith(("http://", "https://"))


def request(url: str, content: bytes | None = None) -> bytes:
    """The body of the answer to a GET, or to a POST of JSON.

    Raises HTTPError for a status that is no success, and ValueError for a server that does not answer whole.
    """
    asked = Request(url, content, {"Content-Type": "application/json"})
    try:
        with urlopen(asked, timeout=_ANSWER_S) as answer:
            body = answer.read(ANSWER_BYTES + 1)
    except HTTPError:
        raise
    except (OSError, HTTPException) as error:
        raise ValueError(f"{url} does not answer ({one_line(str(error))})") from None
    if len(body) > ANSWER_BYTES:
        raise ValueError(f"{url} answers more than {ANSWER_BYTES >> 20} MiB")
    return body
