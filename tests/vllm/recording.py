"""`zerokl record` in a process of its own, and requests to it."""

import http.client
import json
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

IDS = {"return_token_ids": True, "logprobs": True, "temperature": 0.7, "top_p": 0.9, "top_k": -1}


class Recording:
    """A server and a proxy before it, in processes of their own."""

    def __init__(self, folder: Path, server: int, **limits: tuple[int, int]):
        """limits: of resource, such as RLIMIT_NOFILE, each soft and hard."""
        self.log, self.server, self._output = folder / "log.jsonl", server, folder / "output.txt"
        words = ["record", "--upstream", f"http://127.0.0.1:{server}", "--out", str(self.log), "--port", "0"]
        with open(self._output, "w") as output:
            self.process = subprocess.Popen(
                [Path(sys.executable).with_name("zerokl"), *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: [
                    resource.setrlimit(getattr(resource, name), pair) for name, pair in limits.items()
                ],
            )
        self.port = int(self.says(r"127\.0\.0\.1:(\d+)")[1])

    def says(self, pattern: str) -> re.Match[str]:
        """Wait until it says something, and it may take half a minute."""
        until_s = time.monotonic() + 30
        while time.monotonic() < until_s:
            if match := re.search(pattern, self._output.read_text()):
                return match
            time.sleep(0.05)
        raise AssertionError(f"{pattern} is not in {self._output.read_text()}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self, code: int = 0) -> str:
        """Ctrl-C. Returns all that it said."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(timeout=60)
        words = self._output.read_text()
        assert self.process.returncode == code, words
        return words


def ask(port: int, path: str, body: dict, method: str = "POST") -> tuple[int, dict, bytes]:
    """Status, headers and raw body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, json.dumps(body), {"Authorization": "Bearer secret", "X-A": "1"})
    answer = connection.getresponse()
    headers = {k: v for k, v in answer.getheaders() if k not in ("Date", "Transfer-Encoding")}
    return answer.status, headers, answer.read()
