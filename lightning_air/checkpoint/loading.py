"""Load a checkpoint on all ranks: each file fetched and hashed once per node, as it is read, and one verdict for all.

Tensors are filled before the verdict, and nothing is done with them until all ranks have it: what was filled from a
file that proves damaged is filled again from another checkpoint, or the load fails.

A checkpoint that turns out damaged is passed over for the newest valid one beside it, and the warning says which file
was wrong and how. What must not be passed over is raised: a file that names code to run, a checkpoint of a newer
version, a model that does not fit.
"""

import errno
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_air.checkpoint.latest import SHARD_SUFFIX
from lightning_air.checkpoint.load_session import Session, session_for
from lightning_air.checkpoint.manifest import MANIFEST_NAME, OBJECTS_NAME
from lightning_air.checkpoint.matching import Into, State
from lightning_air.checkpoint.opened import read_small_files
from lightning_air.checkpoint.places import join, parent
from lightning_air.checkpoint.ranks import Ranks
from lightning_air.checkpoint.reading import ask
from lightning_air.checkpoint.retry import Patience
from lightning_air.checkpoint.scratch import shared_scratch
from lightning_air.checkpoint.shelf import Shelf
from lightning_air.checkpoint.store import METADATA_NAME
from lightning_air.checkpoint.transfer import download
from lightning_air.checkpoint.untrusted import BadCheckpointError, DamagedCheckpointError, UnsafeCheckpointError

Verify = Literal["digest", "size", "off"]

# How long looking for checkpoints is tried again.
_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class LoadOptions:
    """How checkpoints are loaded.

    Attributes:
        verify: "digest" compares all bytes that are used with the manifest, "size" the files' sizes.
        cache_dir: A local folder for files on their way.
        max_download_workers: How many files one rank downloads at once.
        deadline_seconds: How long all downloads may take.
    """

    verify: Verify
    cache_dir: Path
    max_download_workers: int
    deadline_seconds: float


class _DamagedError(Exception):
    """Some rank has found the checkpoint damaged; every rank raises it at the same point."""


class Loader:
    """Loads for one rank.

    Args:
        ranks: Who loads together.
        shelf: Where checkpoints lie.
        sharing: Which ranks see the same cache folder, this one among them.
        options: How.
        warn: How to warn; called on rank 0.

    Attributes:
        passed_over: What was found damaged.
    """

    def __init__(
        self, ranks: Ranks, shelf: Shelf, sharing: list[int], options: LoadOptions, *, warn: Callable[[str], None]
    ) -> None:
        self._ranks = ranks
        self._shelf = shelf
        self._sharing = sharing
        self._options = options
        self._warn = warn
        self.passed_over: list[str] = []

    def load(
        self,
        path: str,
        into: Into | None = None,
        *,
        weights_only: bool | None = None,
    ) -> tuple[str, dict[str, Any]]:
        """Load a checkpoint, or the newest valid one beside it. Collective: every rank calls this.

        Args:
            path: The same on every rank; a folder, a single file, or a pointer to one.
            into: What to fill in place. None: all of it is returned.
            weights_only: As for `torch.load`.

        Returns:
            Where it was loaded from, and the checkpoint without what was filled in place.

        Raises:
            FileNotFoundError: If nothing is there.
            BadCheckpointError: If it cannot be used, and no other can.
            ValueError: If it does not fit the state.
        """
        problems: list[str] = []
        for candidate in self._candidates(path, problems):
            try:
                loaded = self._load(candidate, into, weights_only=weights_only)
            except _DamagedError as damage:
                problems.append(str(damage))
                self.passed_over.append(candidate)
                continue
            if problems and self._ranks.global_rank == 0:
                self._warn(f"{' '.join(problems)} Loading {candidate} instead.")
            return candidate, loaded
        if not problems:
            raise FileNotFoundError(f"There is no checkpoint at {path}.")
        raise DamagedCheckpointError(f"{' '.join(problems)} There is no other valid checkpoint beside it.")

    # ---- choosing one ------------------------------------------------------------------------------------------------

    def _candidates(self, path: str, problems: list[str]) -> Iterator[str]:
        """Give what was asked for, then what lies beside it, newest first. Collective, step by step."""
        first = self._seen(self._asked_for, path, problems)
        yield from first
        if first or problems:
            yield from (candidate for candidate in self._seen(self._beside, path, problems) if candidate not in first)

    def _seen(self, look: Callable[[str], list[str]], path: str, problems: list[str]) -> list[str]:
        """Return what rank 0 sees, or add to the problems why that is nothing. Collective: every rank calls this."""

        def ask_again() -> list[str]:  # an error that passes must not cost a checkpoint
            return ask(self._shelf.open_store(path), lambda: look(path), Patience(_PATIENCE_SECONDS))

        try:
            found: list[str] = self._told_by_first(ask_again)
        except _DamagedError as damage:
            problems.append(str(damage))
            return []
        return found

    def _asked_for(self, path: str) -> list[str]:
        root = self._shelf.resolve(path)
        generations = self._shelf.generations(root)
        if not generations and (inside := self._shelf.newest_first(root)):
            raise ValueError(
                f"{path} is no checkpoint, but a folder of {len(inside)}. Name one of them, such as {inside[0]}, or "
                "resume from the newest with an AirCheckpoint on this folder and ckpt_path='last'."
            )
        if not generations and any(_is_part(entry.name) for entry in self._shelf.open_store(root).list()):
            raise DamagedCheckpointError(
                f"{join(root, METADATA_NAME)} is missing: its save was not finished, or it is being deleted"
            )
        return [generations[number] for number in sorted(generations, reverse=True)]

    def _beside(self, path: str) -> list[str]:
        with suppress(DamagedCheckpointError):  # a pointer that was cut off, which is a problem already
            path = self._shelf.resolve(path)
        return self._shelf.newest_first(parent(path))

    # ---- loading one -------------------------------------------------------------------------------------------------

    def _load(self, path: str, into: Into | None, *, weights_only: bool | None) -> State:
        """Return the checkpoint. Collective; raises on every rank if it raises on one."""
        contents = self._told_by_first(lambda: read_small_files(path, self._shelf.open_store(path)))
        session: Session = self._together(lambda: session_for(path, self._shelf.open_store, contents, into))
        cache = None
        if not session.store.is_local:
            cache = shared_scratch(self._options.cache_dir, self._ranks.broadcast(uuid.uuid4().hex))
        try:
            self._together(lambda: session.plan(weights_only=weights_only))
            needs: list[dict[str, int]] = self._ranks.all_gather(session.files)
            self._together(lambda: self._fetch(session, needs, cache))
            checked = None
            if self._options.verify == "digest":
                checked = readers_of({rank: needs[rank] for rank in self._sharing})[self._ranks.global_rank]
            loaded: State = self._together(lambda: session.read(cache, checked=checked, weights_only=weights_only))
        finally:
            if cache is not None:
                self._ranks.all_gather(None)  # nobody reads any more
                if self._ranks.global_rank == min(self._sharing):
                    shutil.rmtree(cache, ignore_errors=True)
        return loaded

    def _fetch(self, session: Session, needs: list[dict[str, int]], cache: Path | None) -> None:
        """Have the files that this node needs in its cache, if they are not local, and whole; each rank its part."""
        union = sorted({file for rank in self._sharing for file in needs[rank]})
        mine = union[self._sharing.index(self._ranks.global_rank) :: len(self._sharing)]
        if cache is not None:
            cache.mkdir(parents=True, exist_ok=True)
            download(
                session.store,
                [(file, cache / file) for file in mine],
                max_workers=self._options.max_download_workers,
                deadline_seconds=self._options.deadline_seconds,
            )
        if self._options.verify != "off":
            for file in mine:
                path = session.store.path(file) if cache is None else cache / file
                session.verify_size(file, path)

    # ---- one verdict for all -----------------------------------------------------------------------------------------

    def _told_by_first(self, call: Callable[[], Any]) -> Any:
        """Return on every rank what rank 0 finds, or raise its error. Collective: every rank calls this."""
        value: Any = None
        error: Exception | None = None
        if self._ranks.global_rank == 0:
            try:
                value = call()
            except Exception as raised:  # noqa: BLE001 - raised below, on every rank
                error = raised
        value, told = self._ranks.broadcast((value, None if error is None else _told(error)))
        if told is not None:
            self._raise(told, 0, error)
        return value

    def _together(self, call: Callable[[], Any]) -> Any:
        """Do a step on every rank; if one fails, all raise the first one's error. Collective: every rank calls this."""
        value: Any = None
        error: Exception | None = None
        try:
            value = call()
        except Exception as raised:  # noqa: BLE001 - every rank has to come to the meeting
            error = raised
        verdicts = self._ranks.all_gather(None if error is None else _told(error))
        failed = [(rank, told) for rank, told in enumerate(verdicts) if told is not None]
        if failed:  # what must not be passed over comes first
            rank, told = min(failed, key=lambda item: (item[1][0] == "damaged", item[0]))
            self._raise(told, rank, error)
        return value

    def _raise(self, told: tuple[str, str], rank: int, own: Exception | None) -> None:
        kind, message = told
        if kind == "damaged":
            raise _DamagedError(f"{message.rstrip('.')}.") from own
        if own is not None and _told(own)[0] == kind:
            raise own
        message = message if rank == self._ranks.global_rank else f"On rank {rank}: {message}"
        raise {"unsafe": UnsafeCheckpointError, "bad": BadCheckpointError, "value": ValueError}.get(kind, RuntimeError)(
            message
        )


def readers_of(needs: dict[int, dict[str, int]]) -> dict[int, set[str]]:
    """Return which rank of a node hashes which file as it reads it: one that reads the most of it, taking turns.

    Args:
        needs: Of each rank, how many bytes it needs of which file.
    """
    chosen: dict[int, set[str]] = {rank: set() for rank in needs}
    for file in sorted({file for files in needs.values() for file in files}):
        most = max(files.get(file, -1) for files in needs.values())
        rank = min((rank for rank in needs if needs[rank].get(file, -1) == most), key=lambda rank: len(chosen[rank]))
        chosen[rank].add(file)
    return chosen


def _is_part(file: str) -> bool:
    """Return whether only a checkpoint has a file of this name."""
    return file.endswith(SHARD_SUFFIX) or file in (OBJECTS_NAME, MANIFEST_NAME)


def _told(error: Exception) -> tuple[str, str]:
    """Return what the other ranks are to know of an error: its kind and its message."""
    kinds: tuple[tuple[str, tuple[type[Exception], ...]], ...] = (
        ("damaged", (DamagedCheckpointError, FileNotFoundError)),
        ("unsafe", (UnsafeCheckpointError,)),
        ("bad", (BadCheckpointError,)),
        ("value", (ValueError,)),
    )
    if isinstance(error, OSError) and error.errno in (errno.EIO, errno.ESTALE):  # of the file, not of this machine
        return "damaged", f"{error}"
    kind = next((kind for kind, types in kinds if isinstance(error, types)), "other")
    return kind, f"{error}" if kind != "other" else f"{type(error).__name__}: {error}"
