"""Chromium without a window, driven through a pipe by its DevTools protocol."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    """Returns the path of an installed Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class HeadlessBrowser:
    """One page of a headless Chromium that can reach this machine only.

    Attributes:
      events: events that it has sent, of the domains that were enabled.
    """

    def __init__(self, program: str, profile: Path):
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        command = f'exec 3<&{read} 4>&{write}; exec "$@"'
        options = (
            *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--remote-debugging-pipe", f"--user-data-dir={profile}"),
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            "--window-size=1200,800",
        )
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", program, *options],
            pass_fds=(read, write),
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self._buffer, self._number = b"", 0
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command and returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 2**16)
            assert part, "the browser has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression."""
        result = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True
        )
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = 60.0) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(expression):
            assert time.monotonic() < end, f"{expression} has not become true"
            time.sleep(0.05)

    def screenshot(self, file: Path) -> None:
        """Writes a picture of the page."""
        picture = self.send("Page.captureScreenshot", format="png")["data"]
        file.write_bytes(base64.b64decode(picture))

    def close(self) -> None:
        """Ends the browser."""
        self._process.terminate()
        self._process.wait(10)
        os.close(self._write)
        os.close(self._read)
