"""Is this checkpoint whole? What is wrong is told as data, never raised.

With a manifest every file is known by its size and digest. Without one (stock DCP and Lightning, a single-file `.ckpt`)
what can be seen from outside is checked, and a note says that the content could not be.

What raises is what says nothing about the checkpoint: a store that cannot be reached, a staging disk that is full.
"""

import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from lightning_air.checkpoint import places
from lightning_air.checkpoint.archive import check_archive
from lightning_air.checkpoint.manifest import (
    MANIFEST_NAME,
    OBJECTS_NAME,
    WRITTEN_BY,
    FileRecord,
    Manifest,
    digest_bytes,
    digest_file,
)
from lightning_air.checkpoint.pickle_names import runs_code
from lightning_air.checkpoint.pointer import resolve_pointer
from lightning_air.checkpoint.reading import Reader, ask
from lightning_air.checkpoint.report import CheckpointReport, Level, Problem
from lightning_air.checkpoint.retry import Patience
from lightning_air.checkpoint.safe_pickle import load_metadata, load_object, refused_names
from lightning_air.checkpoint.store import METADATA_NAME, Store
from lightning_air.checkpoint.untrusted import BadCheckpointError, UnsafeCheckpointError

Progress = Callable[[int, int], object]
"""Gets the bytes checked so far and all bytes to check. Called from several threads, one at a time."""

# Ten million chunks are fewer bytes; what is longer would only fill the memory.
MAX_METADATA_BYTES = 2 * 1024**3
MAX_MANIFEST_BYTES = 256 * 1024**2
_STEP = re.compile(r"step=(\d{1,18})", re.ASCII)
_NO_MANIFEST = "no manifest.json: another tool wrote this checkpoint, and its content could not be verified"


def verify_checkpoint(
    path: str | os.PathLike[str] | Store,
    *,
    name: str = "",
    level: Level = "digest",
    weights_only: bool | None = None,
    max_workers: int = 8,
    staging_dir: str | None = None,
    deadline_seconds: float = 7200.0,
    settle_seconds: float = 5.0,
    on_progress: Progress | None = None,
) -> CheckpointReport:
    """Check a checkpoint, and say all that is wrong with it.

    Args:
        path: The checkpoint: a folder, a single file or a pointer file, on any place; or an open store.
        name: With a store: the checkpoint's name there; "" if the store's root is the checkpoint.
        level: "size" asks for the size of every file, and reads `.metadata` and the manifest; "digest" reads it all.
        weights_only: False if the load that follows may run code: then unsafe types in `meta.pt` are no problem.
        max_workers: How many files are read at once.
        staging_dir: Where remote files are downloaded to, one by one; None is the system's temporary directory.
        deadline_seconds: How long reading may take.
        settle_seconds: How long a file in a remote store may remain unseen before it counts as missing.
        on_progress: Told how far the digests are.

    Returns:
        A report whose `valid` is the answer.

    Raises:
        ValueError: If an option is wrong.
        OSError: If a remote store cannot be read, or the staging directory not be written; never for the checkpoint.
    """
    if level not in {"size", "digest"}:
        raise ValueError(f"level must be 'size' or 'digest', got {level!r}.")
    store, name = _open(path) if isinstance(path, str | os.PathLike) else (path, name)
    patience = Patience(deadline_seconds)
    try:
        resolved, is_file = ask(store, lambda: _resolve(store, name), patience)
    except (BadCheckpointError, OSError) as error:
        if isinstance(error, OSError) and not store.is_local:
            raise
        problem = Problem(name, "leads to no checkpoint", found=str(error))
        return CheckpointReport(path=places.join(store.root, name), level=level, problems=(problem,))
    with Reader(
        store,
        resolved,
        staging_dir=staging_dir,
        max_workers=max_workers,
        patience=patience,
        settle_seconds=settle_seconds,
    ) as reader:
        shown_path = places.join(store.root, resolved) if resolved else store.root
        inspection = _Inspection(reader, shown_path, level, weights_only, on_progress)
        return inspection.of_file() if is_file else inspection.of_folder()


def _open(path: str | os.PathLike[str]) -> tuple[Store, str]:
    """Return a store and the checkpoint's name there: of a path alone nobody knows whether it is a file or a folder."""
    root = places.parse_place(path).root
    name = places.name(root)
    try:
        return (places.open_store(places.parent(root)), name) if name else (places.open_store(root), "")
    except ValueError:  # a volume's own root, above which there is no place
        return places.open_store(root), ""


def _resolve(store: Store, name: str) -> tuple[str, bool]:
    """Return where a name leads, and whether a single file is there."""
    resolved = resolve_pointer(store, name) if name else name
    return resolved, bool(resolved) and store.num_bytes(resolved) is not None


class _Inspection:
    """One verification, and what it has found so far."""

    def __init__(
        self, reader: Reader, path: str, level: Level, weights_only: bool | None, on_progress: Progress | None
    ) -> None:
        self._reader = reader
        self._path = path
        self._level = level
        self._weights_only = weights_only
        self._on_progress = on_progress
        self._problems: list[Problem] = []
        self._notes: list[str] = []
        self._lock = threading.Lock()
        self._num_bytes_done = 0
        self._num_bytes_to_do = 0

    # ---- a folder ----------------------------------------------------------------------------------------------------

    def of_folder(self) -> CheckpointReport:
        data = self._read(METADATA_NAME, MAX_METADATA_BYTES)
        metadata = self._parsed(METADATA_NAME, data, load_metadata)
        # It is not waited for where another tool wrote the checkpoint: there is none.
        data_of_manifest = self._read(MANIFEST_NAME, MAX_MANIFEST_BYTES, is_due=metadata is None or _is_ours(metadata))
        manifest = self._parsed(MANIFEST_NAME, data_of_manifest, Manifest.from_json)
        if data is None and not any(problem.file == METADATA_NAME for problem in self._problems):
            self._attempt(METADATA_NAME, lambda: self._add_unpublished(manifest))
        if manifest is not None:
            sizes = self._check_with_manifest(manifest, metadata, data)
        else:
            sizes = self._check_without_manifest(metadata)
        return self._report(sizes, manifest, metadata)

    def _add_unpublished(self, manifest: Manifest | None) -> None:
        self._add(
            METADATA_NAME, "missing, as is all else" if manifest is None and self._reader.is_empty() else "missing"
        )
        self._notes.append("without .metadata it is not published: its save was not finished, or it is being deleted")

    def _check_with_manifest(self, manifest: Manifest, metadata: Metadata | None, data: bytes | None) -> dict[str, int]:
        records = dict(manifest.files)
        expected = records.pop(METADATA_NAME, None)
        if expected is None:
            self._add(METADATA_NAME, "not in the manifest")
        elif data is not None:
            self._compare(METADATA_NAME, expected, digest_bytes(data))
        for file, end in _ends(metadata).items():
            if file not in manifest.files:
                self._add(file, "not in the manifest, but in .metadata")
            elif end > manifest.files[file].num_bytes:
                self._add(file, "shorter in the manifest than in .metadata", end, manifest.files[file].num_bytes)
        intact = self._check_sizes({file: (record.num_bytes, True) for file, record in records.items()})
        if self._level == "digest":
            self._check_digests({file: records[file] for file in intact})
        return {file: record.num_bytes for file, record in manifest.files.items()}

    def _check_without_manifest(self, metadata: Metadata | None) -> dict[str, int]:
        if metadata is None:
            return {}
        if _is_ours(metadata):
            if not any(problem.file == MANIFEST_NAME for problem in self._problems):
                self._add(MANIFEST_NAME, "missing")
        else:
            self._notes.append(_NO_MANIFEST)
        sizes = self._check_sizes({file: (end, False) for file, end in _ends(metadata).items()})
        if self._level == "digest" and self._reader.num_bytes(OBJECTS_NAME, is_due=False) is not None:
            self._attempt(OBJECTS_NAME, lambda: self._check_objects(OBJECTS_NAME))
        return sizes

    def _check_sizes(self, expected: Mapping[str, tuple[int, bool]]) -> dict[str, int]:
        """Return the sizes of the files that are as long as expected: exactly, or at least."""
        intact: dict[str, int] = {}

        def check(file: str) -> None:
            size, is_exact = expected[file]
            found = self._reader.num_bytes(file)
            if found is None:
                self._add(file, "missing")
            elif found < size or (is_exact and found > size):
                self._add(file, "wrong size" if is_exact else "too short", size, found)
            else:
                intact[file] = found

        self._reader.for_each(lambda file: self._attempt(file, lambda: check(file)), expected)
        return intact

    def _check_digests(self, records: Mapping[str, FileRecord]) -> None:
        sizes = [record.num_bytes for record in records.values()]
        self._num_bytes_to_do = sum(sizes)
        largest_first = sorted(records, key=lambda file: -records[file].num_bytes)
        self._reader.for_each(
            lambda file: self._attempt(file, lambda: self._check_digest(file, records[file])),
            largest_first,
            sizes=sizes,
        )

    def _check_digest(self, file: str, expected: FileRecord) -> None:
        with self._reader.local(file) as path:
            found = digest_file(path, on_block=self._advance)
            if found == expected and file == OBJECTS_NAME:
                self._check_objects_at(file, path)
        if found != expected and not self._reader.is_local:
            with self._reader.local(file) as path:  # a second download tells a bad file from a bad transfer
                found = digest_file(path, on_block=self._reader.check_stop)
        self._compare(file, expected, found)

    def _check_objects(self, file: str) -> None:
        with self._reader.local(file) as path:
            self._check_objects_at(file, path)

    def _check_objects_at(self, file: str, path: Path, *, is_small: bool = True) -> None:
        """Check what can be said of a file of `torch.save` before a load; what is small is loaded."""
        names: list[str] = []
        with path.open("rb") as stream:
            try:
                check_archive(stream)
                if self._weights_only is not False:
                    names = refused_names(stream)
                    if is_small and not names:
                        load_object(stream, source="it")
            except BadCheckpointError as error:
                if self._weights_only is not False or not isinstance(error, UnsafeCheckpointError):
                    self._add_bad(file, error)
        if code := [each for each in names if runs_code(each)]:
            self._add(file, "unsafe", found=", ".join(code))
        elif names:
            self._notes.append(
                f"{file} holds {', '.join(names)}: a load needs torch.serialization.add_safe_globals or "
                "weights_only=False"
            )

    # ---- a single file -----------------------------------------------------------------------------------------------

    def of_file(self) -> CheckpointReport:
        num_bytes = self._reader.num_bytes("") or 0
        file = self._path.rpartition("/")[2]
        self._notes.append(_NO_MANIFEST)

        def check(_: str) -> None:
            with self._reader.local("") as path:
                self._check_objects_at(file, path, is_small=False)

        self._reader.for_each(lambda file: self._attempt(file, lambda: check(file)), [file], sizes=[num_bytes])
        return self._report({file: num_bytes}, None, None)

    # ---- what was found ----------------------------------------------------------------------------------------------

    def _attempt(self, file: str, check: Callable[[], object]) -> None:
        """Check a file; that a file of this machine cannot be read is a problem of the checkpoint's."""
        try:
            check()
        except FileNotFoundError:
            self._add(file, "missing")
        except OSError as error:
            if not self._reader.is_local:
                raise
            self._add(file, "cannot be read", found=str(error))

    def _read(self, file: str, max_bytes: int, *, is_due: bool = True) -> bytes | None:
        content: list[bytes] = []

        def read() -> None:
            num_bytes = self._reader.num_bytes(file, is_due=is_due)
            if num_bytes is not None and num_bytes > max_bytes:
                self._add(file, "too large to be one", f"at most {max_bytes}", num_bytes)
            elif num_bytes is not None:
                content.append(self._reader.read(file))

        self._attempt(file, read)
        return content[0] if content else None

    def _parsed(self, file: str, data: bytes | None, parse: Callable[..., Any]) -> Any:
        try:
            return None if data is None else parse(data, source=f"{self._path}/{file}")
        except BadCheckpointError as error:
            self._add_bad(file, error)
            return None

    def _compare(self, file: str, expected: FileRecord, found: FileRecord) -> None:
        if found.num_bytes != expected.num_bytes:
            self._add(file, "wrong size", expected.num_bytes, found.num_bytes)
        elif found != expected:
            self._add(file, "wrong digest", expected.xxh3_128, found.xxh3_128)

    def _add_bad(self, file: str, error: BadCheckpointError) -> None:
        self._add(file, "unsafe" if isinstance(error, UnsafeCheckpointError) else "damaged", found=str(error))

    def _add(self, file: str, what: str, expected: str | int | None = None, found: str | int | None = None) -> None:
        with self._lock:
            self._problems.append(Problem(file, what, expected, found))

    def _advance(self, num_bytes: int) -> None:
        self._reader.check_stop()
        with self._lock:
            self._num_bytes_done += num_bytes
            if self._on_progress is not None:
                self._on_progress(self._num_bytes_done, self._num_bytes_to_do)

    def _report(
        self, sizes: Mapping[str, int], manifest: Manifest | None, metadata: Metadata | None
    ) -> CheckpointReport:
        return CheckpointReport(
            path=self._path,
            level=self._level,
            problems=tuple(sorted(self._problems, key=lambda problem: problem.file)),
            notes=tuple(self._notes),
            step=manifest.step if manifest is not None else step_in_name(self._path.rpartition("/")[2]),
            num_files=len(sizes),
            num_bytes=sum(sizes.values()),
            manifest=manifest,
            metadata=metadata,
        )


def step_in_name(name: str) -> int | None:
    """Return the step in a checkpoint's name, such as "epoch=2-step=300.ckpt"."""
    found = _STEP.search(name)
    return int(found[1]) if found else None


def _is_ours(metadata: Metadata) -> bool:
    return metadata.storage_meta is not None and WRITTEN_BY in metadata.storage_meta.modules


def _ends(metadata: Metadata | None) -> dict[str, int]:
    """Return how long each file has to be at least for what `.metadata` says lies in it."""
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values() if metadata is not None else ():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    return ends
