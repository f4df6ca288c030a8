"""What libraries behind URLs tell and raise, in our words; no listing from a cache."""

import base64
import errno
import hashlib
import importlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec  # type: ignore[import-untyped]
import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from lightning_air.checkpoint.fsspec_store import FsspecStore, told_md5
from lightning_air.checkpoint.store import Store

MD5 = hashlib.md5(b"data").digest()


class Buckets(MemoryFileSystem):  # type: ignore[misc]
    """An object store that lists from a cache, makes missing buckets, and raises what it is told to."""

    protocol = "s3"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    error: ClassVar[BaseException | None] = None
    made: ClassVar[list[str]] = []
    removed: ClassVar[list[str]] = []
    listed: ClassVar[dict[str, Any]] = {}

    def __init__(self, *, use_listings_cache: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.use_listings_cache = use_listings_cache

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("s3://")).lstrip("/")

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.made.append(path)

    def invalidate_cache(self, path: str | None = None) -> None:
        self.listed.clear()

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        if self.error is not None:
            raise self.error
        if path not in self.listed:
            self.listed[path] = super().ls("/" + path, detail, **kwargs)
        return self.listed[path]

    def pipe_file(self, path: str, value: bytes, *args: Any, **kwargs: Any) -> None:
        if self.error is not None:
            raise self.error
        super().pipe_file("/" + path, value, *args, **kwargs)

    def info(self, path: str, **kwargs: Any) -> Any:
        return super().info("/" + path.lstrip("/"), **kwargs)

    def rm_file(self, path: str) -> None:
        self.removed.append(path)
        super().rm_file("/" + path)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setitem(importlib.import_module("fsspec.registry")._registry, "s3", Buckets)
    yield FsspecStore("s3://bucket/run")
    for held in (Buckets.store, Buckets.made, Buckets.removed, Buckets.listed):
        held.clear()
    Buckets.error = None


def test_a_bucket_is_never_made_and_no_cache_is_asked(store: FsspecStore) -> None:
    store.put_bytes("step=1/a", b"data")
    assert [entry.name for entry in store.list("step=1")] == ["step=1/a"]
    store.put_bytes("step=1/b", b"data")
    assert [entry.name for entry in store.list("step=1")] == ["step=1/a", "step=1/b"]
    assert Buckets.made == []
    with store._at("a") as (fs, path):
        assert path == "bucket/run/a"
        assert fs.use_listings_cache is False
        assert fs is not fsspec.filesystem("s3")


def test_metadata_is_deleted_first(store: FsspecStore) -> None:
    for name in ("a", ".metadata", "-b"):
        store.put_bytes(f"step=1/{name}", b"data")
    store.delete_folder("step=1")
    assert Buckets.removed == [f"bucket/run/step=1/{name}" for name in (".metadata", "-b", "a")]


def test_nothing_is_opened_before_it_is_used() -> None:
    store = FsspecStore("nonsense://bucket/run")
    with pytest.raises(OSError, match=r"nonsense://bucket/run/a: Protocol not known"):
        store.read("a")


def test_a_folders_own_marker_is_not_in_it(store: FsspecStore, monkeypatch: pytest.MonkeyPatch) -> None:
    modified = datetime.fromtimestamp(5, UTC)
    listed = [
        {"name": "bucket/run/step=1/", "size": 0, "type": "file"},
        {"name": "bucket/run/step=1/a", "size": 4, "type": "file", "LastModified": modified},
    ]
    monkeypatch.setattr(Buckets, "ls", lambda *_, **__: listed)
    (entry,) = store.list("step=1")
    assert (entry.name, entry.num_bytes, entry.modified_seconds) == ("step=1/a", 4, 5.0)


@pytest.mark.parametrize(
    ("info", "told"),
    [
        ({}, None),
        ({"md5Hash": base64.b64encode(MD5).decode()}, MD5.hex()),
        ({"md5Hash": "not base64!"}, None),
        ({"md5Hash": base64.b64encode(b"short").decode()}, None),
        ({"content_settings": {"content_md5": bytearray(MD5)}}, MD5.hex()),
        ({"content_settings": {"content_md5": None}}, None),
        ({"content_settings": SimpleNamespace(content_md5=MD5)}, MD5.hex()),
        ({"content_settings": SimpleNamespace(content_md5=None)}, None),
        # An ETag looks like an MD5 also where KMS encrypts the object, and then it is none.
        ({"ETag": f'"{MD5.hex()}"'}, None),
        ({"ETag": f'"{MD5.hex()}-3"'}, None),
    ],
)
def test_the_md5_that_a_store_tells(info: dict[str, Any], told: str | None) -> None:
    assert told_md5(info) == told


class HttpError(Exception):
    """What gcsfs (`code`), aiohttp (`status`), azure (`status_code`) and botocore (`response`) raise."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__("what went wrong")
        self.__dict__.update(attributes)


class ServerTimeoutError(Exception):
    """Like aiohttp's."""


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (HttpError(status=404), errno.ENOENT),
        (HttpError(status_code=403), errno.EACCES),
        (HttpError(code=401), errno.EACCES),
        (HttpError(code=429), errno.EBUSY),
        (HttpError(status=408), errno.ETIMEDOUT),
        (HttpError(status_code=503), errno.EIO),
        (HttpError(status=400), errno.EINVAL),
        (HttpError(response={"ResponseMetadata": {"HTTPStatusCode": 500}}), errno.EIO),
        (HttpError(response={}), None),
        (HttpError(code="SlowDown", status_code=503), errno.EIO),
        (ServerTimeoutError("what went wrong"), errno.ECONNRESET),
        (TimeoutError("what went wrong"), errno.ETIMEDOUT),
        (ConnectionResetError("what went wrong"), errno.ECONNRESET),
        (PermissionError("what went wrong"), errno.EACCES),
        (FileNotFoundError("what went wrong"), errno.ENOENT),
        (OSError(errno.EBUSY, "what went wrong"), errno.EBUSY),
        (KeyError("what went wrong"), None),
    ],
    ids=repr,
)
def test_what_a_library_raises_is_an_os_error(store: Store, error: Exception, number: int | None) -> None:
    Buckets.error = error
    with pytest.raises(OSError, match=r"s3://bucket/run/a: .*what went wrong") as raised:
        store.put_bytes("a", b"")
    assert raised.value.errno == number
    assert raised.value.__cause__ is error


def test_an_error_without_words_is_named_by_its_kind(store: Store) -> None:
    Buckets.error = ServerTimeoutError()
    with pytest.raises(OSError, match=r"s3://bucket/run/a: ServerTimeoutError"):
        store.put_bytes("a", b"")


def test_a_listing_that_fails_is_not_an_empty_one(store: Store) -> None:
    Buckets.error = HttpError(status=500)
    with pytest.raises(OSError, match="what went wrong"):
        store.list("step=1")


def test_times_that_are_texts(store: Store, tmp_path: Path) -> None:
    from lightning_air.checkpoint.fsspec_store import _modified

    assert _modified({"updated": "1970-01-01T00:00:05Z"}) == 5
    assert _modified({"updated": "soon"}) is None
    assert _modified({"mtime": 5, "created": 4}) == 5
    assert _modified({}) is None
