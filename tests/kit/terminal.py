"""A real terminal for a test, to see what a person would see in it: tmux, without anybody at it."""

import contextlib
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_SECONDS = 120.0


def tmux_missing() -> str | None:
    """Return why there is no terminal, or None."""
    return None if shutil.which("tmux") else "needs tmux (apt-get install tmux)"


class Terminal:
    """A terminal in which one command runs."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def tmux(self, *arguments: str) -> str:
        """Have tmux do something, and return what it says."""
        command = ["tmux", "-S", str(self._socket), "-f", "/dev/null", *arguments]
        # Without `-u` and a language, it draws what is no ASCII as "_".
        environment = {**os.environ, "LC_ALL": "C.UTF-8", "TERM": "xterm-256color"}
        done = subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        return done.stdout

    def screen(self) -> list[str]:
        """Return the lines that can be seen."""
        return self.tmux("capture-pane", "-p").split("\n")[:-1]

    def everything(self) -> list[str]:
        """Return these and those that have been scrolled away; without the empty ones at the end."""
        return self.tmux("capture-pane", "-p", "-S", "-").rstrip("\n").split("\n")

    def wait_for(self, is_seen: Callable[[list[str]], object]) -> list[str]:
        """Wait until the screen is as it should be, and return it."""
        deadline = time.monotonic() + _SECONDS
        while not is_seen(screen := self.screen()):
            shown = "\n".join(screen)
            assert time.monotonic() < deadline, f"the terminal still shows:\n{shown}"
            time.sleep(0.05)
        return screen


@contextlib.contextmanager
def terminal(command: Sequence[str], *, width: int, height: int, **environment: str) -> Iterator[Terminal]:
    """Yield a terminal in which a command runs, and which stays when the command has ended."""
    folder = Path(tempfile.mkdtemp(prefix="tmux-", dir="/tmp"))  # sockets have short paths
    opened = Terminal(folder / "socket")
    settings = [f"{name}={value}" for name, value in environment.items()]
    try:
        opened.tmux(
            *("new-session", "-d", "-x", str(width), "-y", str(height), "-c", str(Path.cwd())),
            shlex.join(["env", *settings, *command]) + "; exec sleep 600",
        )
        yield opened
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            opened.tmux("kill-server")
        shutil.rmtree(folder, ignore_errors=True)
