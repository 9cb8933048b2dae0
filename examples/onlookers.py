"""What people see of a pool that is looked after: a terminal, the status page, pictures of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import termios
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_HOME = b"\x1b[H"  # a terminal's cursor goes to the top: a new frame begins
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
_KEPT_BYTES = 1 << 20  # of what a terminal was sent
_SECONDS = 10.0  # for the page
_BROWSER_SECONDS = 120.0
_CLOSE_SECONDS = 5.0


class Terminal:
    """A program that draws a full screen, on a pseudo terminal of its own. `close` ends it."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], *, columns: int, lines: int
    ) -> None:
        self._ours, theirs = os.openpty()
        termios.tcsetwinsize(theirs, (lines, columns))
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**environment, "TERM": "xterm-256color"},
        )
        os.close(theirs)
        self._sent = b""  # replaced whole
        self._thread = threading.Thread(target=self._listen, name="terminal", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # EIO: the program has ended
            while part := os.read(self._ours, 1 << 16):
                self._sent = (self._sent + part)[-_KEPT_BYTES:]

    def frame(self) -> str:
        """The last screen that was drawn to its end, as text; "" before there is one."""
        frames = self._sent.split(_HOME)
        if len(frames) < 3:  # the first is what stands before any frame, the last is being drawn
            return ""
        text = _CONTROL.sub("", frames[-2].decode(errors="replace"))
        return "\n".join(line.rstrip() for line in text.split("\n")).rstrip()

    def close(self) -> None:
        """End the program."""
        self.process.kill()
        self.process.wait()
        self._thread.join(_CLOSE_SECONDS)
        os.close(self._ours)


def fetch(url: str) -> str:
    """A page; "" while there is none yet."""
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
            text: str = answer.read().decode()
            return text
    except urllib.error.HTTPError:
        return ""  # the agent's first round is under way


# Any: JSON, of which callers know the form
def fetch_status(url: str) -> dict[str, Any] | None:
    """What the agent says of itself and the pool; None while it says nothing yet."""
    text = fetch(f"{url}/status.json")
    return json.loads(text) if text else None


def find_browser() -> str | None:
    """A browser that can make pictures without a screen."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def photograph(browser: str, url: str, picture: Path, *, profile: Path) -> None:
    """A PNG of a page. Raises OSError when the browser makes none."""
    done = subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--no-first-run",
            f"--user-data-dir={profile}",
            "--window-size=1280,1000",
            f"--screenshot={picture}",
            url,
        ],
        capture_output=True,
        text=True,
        timeout=_BROWSER_SECONDS,
        check=False,
    )
    if not picture.exists():
        raise OSError(f"{browser} made no picture: {done.stderr.strip()[-300:]}")
