"""How `ckpt_path="last"` finds a checkpoint where Lightning itself cannot look.

Lightning asks fsspec whether each path that a callback offers exists, and when it was modified. Of a folder in an
object store fsspec cannot say when, and of an unmounted volume it knows nothing; Lightning then trains from scratch,
silently. So such a path is offered as `lightning-air://<path>`, a scheme whose answers come from the checkpoint's
manifest.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
from fsspec.spec import AbstractFileSystem  # type: ignore[import-untyped]

from lightning_air.checkpoint.manifest import MANIFEST_NAME, Manifest
from lightning_air.checkpoint.places import open_store
from lightning_air.checkpoint.untrusted import BadCheckpointError

_SCHEME = "lightning-air"
_PREFIX = f"{_SCHEME}://"


def wrapped(path: str) -> str:
    """Return what to offer to Lightning for a published checkpoint."""
    return path if Path(path).exists() else _PREFIX + path


def unwrapped(path: str) -> str:
    """Return the checkpoint's own path."""
    return path.removeprefix(_PREFIX)


class PublishedCheckpoints(AbstractFileSystem):  # type: ignore[misc] # fsspec is untyped
    """Answers Lightning's two questions about a path that we have offered."""

    protocol = _SCHEME
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return unwrapped(path)

    def exists(self, path: str, **_: Any) -> bool:
        """Return True: only published checkpoints are offered."""
        del path
        return True

    def modified(self, path: str) -> datetime:
        """Return when the checkpoint was saved."""
        try:
            manifest = Manifest.from_json(open_store(unwrapped(path)).read(MANIFEST_NAME))
        except (OSError, BadCheckpointError):  # a foreign one
            return datetime.fromtimestamp(0, UTC)
        return datetime.fromtimestamp(manifest.created_seconds, UTC)


fsspec.register_implementation(_SCHEME, PublishedCheckpoints, clobber=True)
