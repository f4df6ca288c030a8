"""Named points: where a rank can be killed, stopped or signalled exactly there, and not about there.

A function that a rank runs calls `reach("after save")`; the test arms the point with
`run_ranks(..., signals={(1, "after save"): signal.SIGKILL})`. Points nobody armed cost a dictionary look-up.
"""

import os
import signal
from collections.abc import Mapping

_armed: dict[str, signal.Signals] = {}


def reach(name: str) -> None:
    """Send this process the signal armed for the point, the first time it gets here; else do nothing.

    A process forked by a rank (a data-loading worker) has its own copy of the rank's points, and signals itself.

    Args:
        name: The point. To mean the third step only, pass a name such as `f"step:{step}"`.
    """
    armed_signal = _armed.pop(name, None)
    if armed_signal is not None:
        os.kill(os.getpid(), armed_signal)


def arm(signals: Mapping[str, signal.Signals]) -> None:
    """Set the points of this process; `run_ranks` calls it in each rank."""
    _armed.clear()
    _armed.update(signals)
