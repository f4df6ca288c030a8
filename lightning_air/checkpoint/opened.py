"""A checkpoint folder whose small files have been read and checked: what lies where, and what it must look like."""

from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from lightning_air.checkpoint.manifest import (
    MANIFEST_NAME,
    OBJECTS_NAME,
    WRITTEN_BY,
    FileRecord,
    Manifest,
    digest_bytes,
)
from lightning_air.checkpoint.metadata_file import load_metadata
from lightning_air.checkpoint.pickle_names import named_globals, runs_code
from lightning_air.checkpoint.places import join
from lightning_air.checkpoint.reading import ask
from lightning_air.checkpoint.retry import Patience
from lightning_air.checkpoint.store import METADATA_NAME, Store
from lightning_air.checkpoint.untrusted import DamagedCheckpointError

# How long one question to a store is tried again.
_PATIENCE_SECONDS = 60.0


def read_small_files(path: str, store: Store) -> dict[str, bytes] | None:
    """Return `.metadata`, and `manifest.json` and `meta.pt` where they are there; None if there is no `.metadata`.

    Raises:
        OSError: Naming the file that cannot be read.
    """
    contents = {}
    for file in (METADATA_NAME, MANIFEST_NAME, OBJECTS_NAME):
        try:
            if ask(store, lambda file=file: store.num_bytes(file), Patience(_PATIENCE_SECONDS)) is not None:  # type: ignore[misc]
                contents[file] = ask(store, lambda file=file: store.read(file), Patience(_PATIENCE_SECONDS))  # type: ignore[misc]
        except OSError as error:
            raise OSError(error.errno, f"{join(path, file)} cannot be read: {error}") from error
    return contents if METADATA_NAME in contents else None


@dataclass(frozen=True)
class OpenedFolder:
    """A checkpoint that can be planned with.

    Attributes:
        path: Where it is.
        metadata: What lies where.
        manifest: What each file must look like; None if another program wrote it.
        meta: The content of `meta.pt`, if it has one.
    """

    path: str
    metadata: Metadata
    manifest: Manifest | None
    meta: bytes | None

    @classmethod
    def check(cls, path: str, contents: dict[str, bytes]) -> "OpenedFolder":
        """Return the folder with these small files.

        Raises:
            DamagedCheckpointError: If one of them is missing, or not as it was written.
            UnsafeCheckpointError: If `.metadata` names what none needs.
            NewerCheckpointError: If a newer version wrote it.
        """
        if _is_planted(contents[METADATA_NAME]):
            load_metadata(contents[METADATA_NAME], source=join(path, METADATA_NAME))  # refuses it by name
        manifest = None
        if MANIFEST_NAME in contents:
            manifest = Manifest.from_json(contents[MANIFEST_NAME], source=join(path, MANIFEST_NAME))
            for file in (METADATA_NAME, OBJECTS_NAME):
                if file not in manifest.files:
                    continue
                if file not in contents:
                    raise DamagedCheckpointError(f"{join(path, file)} is missing")
                if digest_bytes(contents[file]) != manifest.files[file]:
                    raise DamagedCheckpointError(f"{join(path, file)} is not as it was written: its digest is another")
        metadata = load_metadata(contents[METADATA_NAME], source=join(path, METADATA_NAME))
        if manifest is None and WRITTEN_BY in getattr(metadata.storage_meta, "modules", []):
            raise DamagedCheckpointError(f"{join(path, MANIFEST_NAME)} is missing")
        return cls(path, metadata, manifest, contents.get(OBJECTS_NAME))

    def verify_size(self, file: str, local: Path) -> None:
        """Check the size of a local copy of a file, or of the file itself.

        Raises:
            DamagedCheckpointError: If it is not as it was written.
        """
        if self.manifest is None:
            return
        expected = self._expected(self.manifest, file).num_bytes
        num_bytes = local.stat().st_size
        if num_bytes != expected:
            raise DamagedCheckpointError(f"{join(self.path, file)} has {num_bytes} bytes instead of {expected}")

    def compare(self, file: str, found: FileRecord) -> None:
        """Check a file's digest. Without a manifest there is nothing to compare with.

        Raises:
            DamagedCheckpointError: If it is not as it was written.
        """
        if self.manifest is None:
            return
        expected = self._expected(self.manifest, file)
        if found != expected:
            raise DamagedCheckpointError(
                f"{join(self.path, file)} is not as it was written: its digest is {found.xxh3_128} instead of "
                f"{expected.xxh3_128}"
            )

    def _expected(self, manifest: Manifest, file: str) -> FileRecord:
        if file not in manifest.files:
            raise DamagedCheckpointError(f"{join(self.path, file)} is not in the manifest")
        return manifest.files[file]


def _is_planted(metadata: bytes) -> bool:
    """Return whether a `.metadata` names code of Python's own.

    A few altered bits make it ask for something else, and only its digest tells that it is no more than damaged.
    """
    return any(runs_code(name) for name in named_globals(metadata) if not name.startswith("torch."))
