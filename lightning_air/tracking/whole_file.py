"""Write a small file so that nobody ever reads half of it."""

import os
from pathlib import Path

SCRATCH_SUFFIX = ".new"
"""Of the file that is written first; a killed process may leave one."""


def write_whole(path: Path, text: str) -> None:
    """Replace a small file; whoever reads it finds the old one or the new one, also after a SIGKILL."""
    scratch = path.with_name(path.name + SCRATCH_SUFFIX)
    # Only the user's: a tracking URI may hold a password.
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(text)
    scratch.replace(path)
