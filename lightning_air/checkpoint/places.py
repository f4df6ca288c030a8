"""The paths that users write: what each means, and what to write instead of a wrong one.

`parse_place` decides by the text (and where links lead) whether a path is local, on a Unity Catalog volume or a URL,
and refuses, before any training, what could not hold a checkpoint. `open_store` gives the files there. A URL is text
and stays whole: no `Path` ever touches it, here or in `join`, `parent` and `name`.
"""

import os
import re
import urllib.parse
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_air.checkpoint.files_api_store import FilesApiStore
from lightning_air.checkpoint.local_store import LocalStore
from lightning_air.checkpoint.retry import Patience, retry
from lightning_air.checkpoint.store import Store, checked_name, os_error, reason_of
from lightning_air.checkpoint.transfer import upload
from lightning_air.checkpoint.volume_store import MountedVolumeStore

VOLUME_FORM = "/Volumes/<catalog>/<schema>/<volume>/<folder>"

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//?)(.*)", re.DOTALL)
# What stays together at a place's start: the slash, or a URL's scheme and host ("memory" and "file" have no host).
_ANCHOR = re.compile(r"/+|(?:memory|file|local)://+|[A-Za-z][A-Za-z0-9+.-]*:(?://[^/]*/*|/+)|", re.IGNORECASE)
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"} | dict.fromkeys(
    ("abfs", "abfss", "az"), "adlfs"
)
_REFUSED = {
    "/dbfs": f"The DBFS mount does not exist on serverless compute. Write {VOLUME_FORM!r}.",
    "/Workspace": "Workspace files are for code: their size is limited, and a relative path leads there when the code "
    f"lies there. Write {VOLUME_FORM!r}.",
    "/local_disk0": "Serverless compute cannot write there. Write "
    f"{VOLUME_FORM!r}, or a folder under '/tmp' for what need not outlive the machine.",
}


@dataclass(frozen=True)
class Place:
    """Where a path leads.

    Attributes:
        kind: "local", "volume" or "url".
        root: An absolute path, "/Volumes/…", or a URL; without a trailing slash. Parsing it gives the same place.
    """

    kind: Literal["local", "volume", "url"]
    root: str


def parse_place(path: str | os.PathLike[str]) -> Place:
    """Return the place that a user's path means.

    Args:
        path: A local path (also relative, `~…` or `file://…`), `/Volumes/…`, `dbfs:/Volumes/…`, or a URL that fsspec
            knows.

    Raises:
        ValueError: With the path and what to write instead.
    """
    text = os.fspath(path)
    if not text or text != text.strip() or "\0" in text:
        raise _refusal(path, f"It is empty, or has spaces around it. Write {VOLUME_FORM!r}, a local path or a URL.")
    if text.lower().startswith("dbfs:"):
        below = text[len("dbfs:") :]
        if not re.match(r"/+Volumes(/|$)", below):
            raise _refusal(path, f"Of DBFS only volumes can be used. Write {VOLUME_FORM!r}.")
        return _volume(path, below)
    scheme, slashes, rest = _scheme(text)
    if scheme in {"file", "local"} and slashes:
        return _local(path, _path_of_file_url(path, slashes + rest))
    if slashes == "//":
        return _url(path, scheme, rest)
    if "://" in text:
        raise _refusal(path, "Only plain URLs are understood, no chained ones. Write 's3://bucket/folder'.")
    if slashes == "/" and _is_known(scheme):
        raise _refusal(path, f"`Path` takes a slash out of a URL. Write '{scheme}://{rest}', as a string.")
    return _local(path, text)


def open_store(path: str | os.PathLike[str], *, volumes_root: Path = Path("/Volumes")) -> Store:
    """Return the files at a place. Creates nothing and opens no connection; looks whether a volume is mounted.

    Args:
        path: As for `parse_place`.
        volumes_root: Where volumes are mounted, if at all. Without its mount a volume is reached by the Files API.

    Raises:
        ValueError: If the path is wrong.
        ModuleNotFoundError: If the volume is not mounted and the package for the Files API is missing.
    """
    place = parse_place(path)
    if place.kind == "local":
        return LocalStore(Path(place.root))
    if place.kind == "url":
        # fsspec takes a tenth of a second to import, and most places need none.
        from lightning_air.checkpoint.fsspec_store import FsspecStore  # noqa: PLC0415

        return FsspecStore(place.root)
    parts = place.root.split("/")[2:]
    if os.path.isdir(volumes_root.joinpath(*parts[:3])):  # noqa: PTH112 - Path.is_dir raises where one may not look
        return MountedVolumeStore(place.root, volume=volumes_root.joinpath(*parts[:3]), folder="/".join(parts[3:]))
    return FilesApiStore(place.root)


def check_writable(store: Store, *, deadline_seconds: float = 60.0) -> None:
    """Write, measure and delete a small file at the root, which is made if it is not there.

    Raises:
        OSError: With what failed and what to do.
    """
    probe = f".lightning-air-probe-{uuid.uuid4().hex}"
    try:
        try:
            upload(store, [(probe, b"may be deleted")], max_workers=1, deadline_seconds=deadline_seconds)
        except OSError:
            with suppress(OSError):  # the first error says what is wrong
                store.delete(probe)
            raise
        retry(lambda: store.delete(probe), Patience(deadline_seconds))
    except OSError as error:
        raise os_error(
            error,
            f"checkpoints cannot be written to {store.root!r}: {reason_of(error)}. Check that the place exists, that "
            "this user may create and delete files there (on a volume: READ VOLUME and WRITE VOLUME), and that it is "
            "not full.",
        ) from error


def join(path: str, *names: str) -> str:
    """Return the place below another one, by relative names such as "step=100/model.distcp"."""
    anchor, rest = _split(path)
    if anchor and not anchor.endswith("/"):
        anchor += "/"
    return anchor + "/".join([*([rest] if rest else []), *map(checked_name, names)])


def parent(path: str) -> str:
    """Return the folder of a place; a file system's or bucket's root is its own."""
    anchor, rest = _split(path)
    above = rest.rpartition("/")[0].rstrip("/")
    top = anchor.rstrip("/")
    return anchor + above if above else anchor if not top or top.endswith(":") else top


def name(path: str) -> str:
    """Return the last part of a place; "" for a file system's or bucket's root."""
    return _split(path)[1].rpartition("/")[2]


def _split(path: str) -> tuple[str, str]:
    """Return what must stay together at the start ("/", "s3://bucket/"), and the rest without slashes around it."""
    match = _ANCHOR.match(path)
    anchor = match[0] if match else ""
    return anchor, path[len(anchor) :].strip("/")


def _scheme(text: str) -> tuple[str, str, str]:
    """Return a URL's scheme, the one or two slashes behind its colon, and the rest; three times "" for a path."""
    match = _URL.fullmatch(text)
    return (match[1].lower(), match[2], match[3]) if match else ("", "", "")


def _refusal(path: str | os.PathLike[str], remedy: str) -> ValueError:
    return ValueError(f"no place for checkpoints: {os.fspath(path)!r}. {remedy}")


def _local(path: str | os.PathLike[str], text: str) -> Place:
    expanded = os.path.expanduser(text)  # noqa: PTH111 - Path would hide a dot or a doubled slash
    if expanded.startswith("~"):
        raise _refusal(path, "There is no such user. Write the home directory out.")
    absolute, real = os.path.abspath(expanded), os.path.realpath(expanded)  # noqa: PTH100
    for where in (expanded, absolute, real):  # the code may run in a volume, and a link may lead to one
        top = "/" + where.lstrip("/").split("/")[0] if where.startswith("/") else ""
        if top in _REFUSED:
            raise _refusal(path, _REFUSED[top])
        is_misspelt = top.lower() in {"/volume", "/volumes"} and not os.path.isdir(top)  # noqa: PTH112
        if top == "/Volumes" or is_misspelt:
            return _volume(path, where)
    # A `..` behind a link leads elsewhere than the text says, so only the file system can take it out.
    chosen = real if ".." in expanded.split("/") else absolute
    return Place("local", "/" + chosen.lstrip("/"))


def _volume(path: str | os.PathLike[str], text: str) -> Place:
    parts = [part for part in text.split("/") if part not in {"", "."}]
    if parts[0] != "Volumes" or len(parts) < 4 or ".." in parts:  # noqa: PLR2004 - Volumes, catalog, schema, volume
        raise _refusal(path, f"A volume is written {VOLUME_FORM!r}, with all three names and no '..'.")
    return Place("volume", "/" + "/".join(parts))


def _url(path: str | os.PathLike[str], scheme: str, rest: str) -> Place:
    import fsspec  # type: ignore[import-untyped]  # noqa: PLC0415 - a tenth of a second, for URLs only

    below = rest.rstrip("/")
    if not below.strip("/") or {".", ".."} & set(below.split("/")) or "::" in below:
        raise _refusal(path, f"Write '{scheme}://<bucket>/<folder>', without '.', '..' or '::'.")
    try:
        fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        if scheme in _PACKAGES:
            remedy = f"It needs another package: pip install {_PACKAGES[scheme]}."
        elif isinstance(error, ImportError):
            remedy = f"It needs another package: {error}."
        else:
            remedy = (
                f"fsspec knows no {scheme + '://'!r}. Write {VOLUME_FORM!r}, a local path, or 's3://bucket/folder'."
            )
        raise _refusal(path, remedy) from error
    return Place("url", f"{scheme}://{below}")


def _is_known(scheme: str) -> bool:
    import fsspec  # noqa: PLC0415

    return scheme in _PACKAGES or scheme in fsspec.available_protocols()


def _path_of_file_url(path: str | os.PathLike[str], rest: str) -> str:
    host, slash, location = rest[2:].partition("/") if rest.startswith("//") else ("", "/", rest[1:])
    location = urllib.parse.unquote(slash + location)
    if host.lower() not in {"", "localhost"} or not slash or "\0" in location:
        raise _refusal(path, "A file URL has three slashes. Write 'file:///folder', or the path without 'file:'.")
    return location
