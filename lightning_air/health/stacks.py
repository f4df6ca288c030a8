"""Where the threads of this process are, told by another thread: as text for people, and in a few words."""

import faulthandler
import sys
import sysconfig
import tempfile
import traceback
from pathlib import Path

_LIBRARIES = tuple(
    {f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {f"{Path(__file__).parent}/"}
)
_MAX_CHARACTERS = 60_000


def all_stacks() -> str:
    """Return the stacks of all threads, innermost call first, as faulthandler writes them."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return file.read(_MAX_CHARACTERS)


def where_is(thread_ident: int) -> str:
    """Return the innermost line of the user's own code that a thread is in and, if it goes on from there, where it is.

    Args:
        thread_ident: As `threading.get_ident` says it.
    """
    frame = sys._current_frames().get(thread_ident)  # noqa: SLF001 - documented, in spite of its name
    if frame is None:
        return "nowhere: its thread has ended"
    stack = traceback.extract_stack(frame)
    own = [entry for entry in stack if not entry.filename.startswith((*_LIBRARIES, "<"))]
    innermost = stack[-1]
    if not own:
        return _line(innermost)
    return _line(own[-1]) if own[-1] is innermost else f"{_line(own[-1])}, which is in {_line(innermost)}"


def _line(entry: traceback.FrameSummary) -> str:
    return f"{entry.name} ({'/'.join(Path(entry.filename).parts[-2:])}:{entry.lineno})"
