"""Installs the project into the virtual environment that runs this script, and shows how far pip is.

Usage: .venv/bin/python tools/install.py CONSTRAINTS EXTRAS

pip's own output goes to `install.log` inside the environment and is shown only if pip fails. Only the standard library
is used: nothing else is installed yet.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

LOG = Path(sys.prefix) / "install.log"
BAR_WIDTH = 24
PLAIN_EVERY_S = 10.0  # how often a line is printed where there is no terminal


class Progress:
    """What pip is doing, as a bar that redraws itself on a terminal and as a few plain lines elsewhere."""

    def __init__(self, total: int) -> None:
        self.total, self.doing = total, "starting pip"
        self.found: set[str] = set()
        self.started = self.printed = time.monotonic()
        self.done = threading.Event()
        self.terminal = sys.stdout.isatty()
        self.ticker = threading.Thread(target=self._tick, daemon=True)

    def read(self, line: str) -> None:
        """Takes one line of pip's output. The names of packages become known one by one, then all are unpacked."""
        if match := re.match(r"(?:Collecting|Processing|Requirement already satisfied:) (\S+)", line):
            self.doing = re.split(r"[<>=!~\[;]|-\d", match.group(1).rsplit("/", 1)[-1])[0]
            self.found.add(self.doing.lower().replace("_", "-"))
        elif match := re.match(r"\s*(?:Downloading|Using cached) (\S+)", line):
            self.doing = "fetching " + match.group(1).rsplit("/", 1)[-1].split("-")[0]
        elif line.startswith("Installing collected packages"):
            self.doing = "unpacking"

    def _tick(self) -> None:
        while not self.done.wait(0.2 if self.terminal else 1.0):
            self.show()

    def show(self, last: bool = False) -> None:
        now = time.monotonic()
        seen = min(len(self.found), self.total)
        text = f"{seen}/{self.total} packages, {now - self.started:3.0f} s: {self.doing}"
        if self.terminal:
            full = BAR_WIDTH * seen // self.total
            print(
                f"\r\033[K    [{'#' * full}{'.' * (BAR_WIDTH - full)}] {text[:70]}",
                end="\n" if last else "",
                flush=True,
            )
        elif last or now - self.printed >= PLAIN_EVERY_S:
            self.printed = now
            print(f"    {text}", flush=True)


def pip(arguments: list[str], progress: Progress) -> int:
    """Runs `pip install`; returns its exit status."""
    command = [sys.executable, "-m", "pip", "install", "--progress-bar", "off", *arguments]
    with LOG.open("a") as log:
        log.write(f"$ {' '.join(command)}\n")
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                progress.read(line)
        return process.returncode


def main(constraints: str, extras: str) -> int:
    pins = [line for line in Path(constraints).read_text().splitlines() if line and not line.startswith("#")]
    progress = Progress(len(pins))
    progress.ticker.start()
    LOG.unlink(missing_ok=True)
    # The build tools come first, with pinned versions too: no build environment is downloaded behind pip's back.
    status = pip(["-c", constraints, "setuptools", "wheel"], progress)
    status = status or pip(["-c", constraints, "--no-build-isolation", "-e", f".[{extras}]"], progress)
    progress.done.set()
    progress.ticker.join()
    progress.doing = f"pip failed with status {status}" if status else "installed"
    progress.show(last=True)
    if status:
        print("\n".join(LOG.read_text().splitlines()[-30:]), f"\nthe whole log: {LOG}", file=sys.stderr)
    return status


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
