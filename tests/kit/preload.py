"""Import, once, in the fork server, what every rank needs.

`multiprocessing` swallows the `ImportError` of a preloaded module and dies of any other exception. So the fork server
preloads this one module, which survives every failure and remembers it for the ranks to report. Nobody else imports
it: that a rank finds it in `sys.modules` is the proof that the preload ran.
"""

import gc
import importlib
import os
import sys
import threading
import traceback
import weakref
from pathlib import Path

MODULES = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.data",
    "lightning.pytorch",
    "jsonargparse",
    "mlflow",
    # Test modules import these; a rank imports the test module that its function lives in.
    "hypothesis",
    "pytest",
    "lightning_air",
    "lightning_air.checkpoint",
    "lightning_air.cli",
    "lightning_air.data",
    "lightning_air.health",
    "lightning_air.runtime",
    "lightning_air.strategy",
    "lightning_air.tracking",
    "tests.kit.rank_process",
)

failures: dict[str, str] = {}
"""Module name to the last line of the exception that its import raised."""

added_environment: dict[str, str] = {}
"""Variables that the imports set in their own process, as they would have in a rank that imports them itself."""


def native_threads() -> list[str]:
    """Return the names of all threads of this process, C ones included; empty where /proc is missing."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return [thread.name for thread in threading.enumerate()]
    return [(task / "comm").read_text().strip() for task in tasks.iterdir()]


def _preload() -> None:
    before = dict(os.environ)
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a room under construction must not stop the tests of the others.
            failures[name] = traceback.format_exception_only(error)[-1].strip()
    added_environment.update({name: value for name, value in os.environ.items() if before.get(name) != value})
    # At exit, torch would take its own operators out of the dispatcher one by one: half of a short rank's time.
    for finalizer in getattr(weakref.finalize, "_registry"):  # noqa: B009 - private, and unknown to typeshed.
        finalizer.atexit = False
    # Ranks share these pages with the server; collecting them would copy every page that a collection touches.
    gc.collect()
    gc.freeze()


_preload()
server_pid = os.getpid()
modules_at_start = frozenset(sys.modules)
threads_at_start = native_threads()
"""What ran in the fork server besides its main thread would be missing, maybe with a lock held, in every rank."""
