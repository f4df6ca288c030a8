"""What a path means; what to write instead of a wrong one."""

import errno
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_air.checkpoint import places
from lightning_air.checkpoint.files_api_store import FilesApiStore
from lightning_air.checkpoint.fsspec_store import FsspecStore
from lightning_air.checkpoint.local_store import LocalStore
from lightning_air.checkpoint.places import Place, check_writable, join, name, open_store, parent, parse_place
from lightning_air.checkpoint.volume_store import MountedVolumeStore
from tests.checkpoint.test_stores import mounted
from tests.kit.hostile import Behaviour, Fault, HostileStore

law = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
SEGMENTS = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda text: text not in {".", ".."} and text.strip() == text and "::" not in text
)
BELOW = st.lists(SEGMENTS, min_size=1, max_size=4)
ROOTS = ["/tmp", "/", "/Volumes/main/default/ckpt", "s3://bucket", "gs://bucket/a b", "memory://", "memory:///x"]
ROOTS += ["abfss://container@account.dfs.core.windows.net", "dbfs:/Volumes/main/default/ckpt", "file:///tmp"]


# ---- what is understood ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/tmp/run", Place("local", "/tmp/run")),
        ("/tmp//run/./", Place("local", "/tmp/run")),
        ("//tmp/run", Place("local", "/tmp/run")),
        ("/", Place("local", "/")),
        (Path("/tmp/run"), Place("local", "/tmp/run")),
        ("file:///tmp/run", Place("local", "/tmp/run")),
        ("file:///tmp/my%20run", Place("local", "/tmp/my run")),
        ("file:///tmp/a?b#c", Place("local", "/tmp/a?b#c")),
        ("file://localhost/tmp/run", Place("local", "/tmp/run")),
        (Path("file:///tmp/run"), Place("local", "/tmp/run")),
        ("FILE:///tmp/run", Place("local", "/tmp/run")),
        ("/Volumes/main/default/ckpt", Place("volume", "/Volumes/main/default/ckpt")),
        ("/Volumes/main/default/ckpt//run/", Place("volume", "/Volumes/main/default/ckpt/run")),
        (Path("/Volumes/main/default/ckpt/run"), Place("volume", "/Volumes/main/default/ckpt/run")),
        ("dbfs:/Volumes/main/default/ckpt/run", Place("volume", "/Volumes/main/default/ckpt/run")),
        ("dbfs:///Volumes/main/default/ckpt/run", Place("volume", "/Volumes/main/default/ckpt/run")),
        (Path("dbfs:/Volumes/main/default/ckpt/run"), Place("volume", "/Volumes/main/default/ckpt/run")),
        ("file:///Volumes/main/default/ckpt/run", Place("volume", "/Volumes/main/default/ckpt/run")),
        ("memory://run", Place("url", "memory://run")),
        ("memory:///run/", Place("url", "memory:///run")),
        ("MEMORY://run//a b%20c?d#e", Place("url", "memory://run//a b%20c?d#e")),
    ],
)
def test_a_path_means_a_place(path: str | Path, place: Place) -> None:
    assert parse_place(path) == place


def test_a_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path.resolve()
    (here / "code").mkdir()
    monkeypatch.chdir(here / "code")
    monkeypatch.setenv("HOME", "/home/somebody")
    for path, root in (
        ("run", f"{here}/code/run"),
        (".", f"{here}/code"),
        ("../run", f"{here}/run"),
        ("run:1/::x", f"{here}/code/run:1/::x"),
        ("nonsense:/run", f"{here}/code/nonsense:/run"),
        ("~/run", "/home/somebody/run"),
    ):
        assert parse_place(path) == Place("local", root)


def test_a_link_stays_and_a_step_up_from_it_goes_where_the_file_system_says(tmp_path: Path) -> None:
    here = tmp_path.resolve()
    (here / "disk" / "runs").mkdir(parents=True)
    (here / "link").symlink_to(here / "disk" / "runs")
    assert parse_place("link/a").root == f"{here}/link/a"
    assert parse_place("link/../a").root == f"{here}/disk/a"


def test_a_link_into_a_volume_is_that_volume(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/Volumes/main/default/ckpt")
    assert parse_place("link/run") == Place("volume", "/Volumes/main/default/ckpt/run")


@law
@given(st.sampled_from(["/tmp", "/Volumes/main/default/ckpt", "dbfs:/Volumes/main/default/ckpt", "memory:/"]), BELOW)
def test_parsing_a_place_again_changes_nothing(root: str, below: list[str]) -> None:
    place = parse_place("/".join([root, *below]) if root != "memory:/" else join("memory://", *below))
    assert place.kind == {"/tmp": "local", "memory:/": "url"}.get(root, "volume")
    assert parse_place(place.root) == place
    assert name(place.root) == below[-1]
    assert not place.root.endswith("/")


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("", "It is empty"),
        ("  ", "It is empty"),
        (" /tmp/run", "spaces around it"),
        ("/tmp/run\n", "spaces around it"),
        ("/tmp/a\0b", "It is empty"),
        ("/Volumes", "'/Volumes/<catalog>/<schema>/<volume>/<folder>', with all three names"),
        ("/Volumes/main", "with all three names"),
        ("/Volumes/main/default/", "with all three names"),
        ("/Volumes/main//default/", "with all three names"),
        ("/Volumes/main/default/ckpt/../../other/secret", "no '..'"),
        ("/Volumes/../etc", "no '..'"),
        ("/volumes/main/default/ckpt", "'/Volumes/<catalog>"),
        ("/Volume/main/default/ckpt", "'/Volumes/<catalog>"),
        ("dbfs:/", "Of DBFS only volumes"),
        ("dbfs:", "Of DBFS only volumes"),
        ("dbfs:Volumes/main/default/ckpt", "Of DBFS only volumes"),
        ("dbfs:/VolumesX/main/default/ckpt", "Of DBFS only volumes"),
        ("dbfs:/mnt/run", "Of DBFS only volumes"),
        ("dbfs:/tmp/Volumes/x", "Of DBFS only volumes"),
        ("dbfs:/Volumes/main", "with all three names"),
        ("dbfs:/Volumes/main/default/ckpt/..", "no '..'"),
        ("/dbfs/Volumes/main/default/ckpt", "DBFS mount does not exist on serverless"),
        ("/dbfs/mnt/run", "DBFS mount"),
        ("file:///dbfs/run", "DBFS mount"),
        ("/Workspace/Users/me/run", "Workspace files are for code"),
        ("/local_disk0/tmp/run", "Serverless compute cannot write there"),
        ("memory://", "'memory://<bucket>/<folder>'"),
        ("memory:///", "'memory://<bucket>/<folder>'"),
        ("memory://a/../b", "without '.', '..'"),
        ("memory://a/./b", "without '.', '..'"),
        ("memory:/run", "Write 'memory://run', as a string"),
        (Path("s3://bucket/run"), "Write 's3://bucket/run', as a string"),
        ("nonsense://bucket/run", "fsspec knows no 'nonsense://'"),
        ("simplecache::s3://bucket/run", "no chained ones"),
        ("memory://a::s3://b", "without '.', '..' or '::'"),
        ("file://server/share", "three slashes"),
        ("file://", "three slashes"),
        ("file:///tmp/a%00b", "three slashes"),
        ("file:relative://x", "no chained ones"),
        ("~nobody-of-that-name/run", "no such user"),
    ],
)
def test_a_wrong_path_is_refused_with_what_to_write_instead(path: str | Path, remedy: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"no place for checkpoints: {os.fspath(path)!r}")) as raised:
        parse_place(path)
    assert remedy in str(raised.value)
    with pytest.raises(ValueError, match="no place for checkpoints"):
        open_store(path)


def test_a_relative_path_of_code_in_the_workspace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: "/Workspace/Users/me")
    with pytest.raises(ValueError, match=r"'checkpoints'. Workspace files are for code"):
        parse_place("checkpoints")


def test_a_home_on_the_wrong_disk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/local_disk0/me")
    with pytest.raises(ValueError, match=r"'~/run'. Serverless compute"):
        parse_place("~/run")


@pytest.mark.parametrize(
    ("scheme", "remedy"),
    [
        ("s3", "pip install s3fs"),
        ("gs", "pip install gcsfs"),
        ("abfss", "pip install adlfs"),
        ("oss", "Install ossfs to access"),
    ],
)
def test_a_url_whose_library_is_missing_names_it(scheme: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("s3fs", "gcsfs", "adlfs", "ossfs"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"no place for checkpoints: '{scheme}://bucket/run'.*{remedy}"):
        parse_place(f"{scheme}://bucket/run")


# ---- stores ----------------------------------------------------------------------------------------------------------


def test_a_place_is_opened_as_what_it_is(tmp_path: Path) -> None:
    for path, kind, root in (
        (str(tmp_path / "run"), LocalStore, f"{tmp_path}/run"),
        ("run", LocalStore, f"{tmp_path}/run"),
        ("memory://run/", FsspecStore, "memory://run"),
        ("dbfs:/Volumes/main/default/ckpt/run", FilesApiStore, "/Volumes/main/default/ckpt/run"),
    ):
        store = open_store(path, volumes_root=tmp_path)
        assert type(store) is kind
        assert store.root == root
        assert store.is_local is (kind is LocalStore)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["", "run/deeper"])
def test_a_volume_is_used_through_its_mount_if_it_has_one(tmp_path: Path, folder: str) -> None:
    volume = tmp_path / "Volumes" / "main" / "default" / "ckpt"
    path = f"/Volumes/main/default/ckpt/{folder}".rstrip("/")
    volume.parent.mkdir(parents=True)
    assert type(open_store(path, volumes_root=tmp_path / "Volumes")) is FilesApiStore
    volume.mkdir()
    store = open_store(path, volumes_root=tmp_path / "Volumes")
    assert type(store) is MountedVolumeStore
    assert store.root == path
    store.put_bytes("a", b"data")
    assert (volume / folder / "a").read_bytes() == b"data"


def test_a_volume_without_a_mount_needs_the_sdk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [known for known in sys.modules if known.split(".")[0] == "databricks"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "databricks", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install lightning-air\[databricks\]"):
        open_store("/Volumes/main/default/ckpt", volumes_root=tmp_path)


# ---- can it be written? ----------------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[str]:
    yield "memory://places"
    fsspec.filesystem("memory").store.clear()


def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path: Path, memory: str) -> None:
    for store in (LocalStore(tmp_path / "run"), mounted(tmp_path), FsspecStore(memory), HostileStore(tmp_path / "h")):
        check_writable(store)
        assert store.list() == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_place_that_cannot_be_written_says_so(number: int) -> None:
    store = HostileStore(Path("store"), Behaviour(faults=[Fault(number)]))
    with pytest.raises(OSError, match=r"cannot be written to '/Volumes/main/default/hostile'.*WRITE VOLUME") as raised:
        check_writable(store)
    assert raised.value.errno == number
    assert os.strerror(number) in str(raised.value)
    assert store.list() == []


def test_a_place_where_a_file_should_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(OSError, match=f"cannot be written to '{tmp_path}/run'"):
        check_writable(LocalStore(tmp_path / "run"))


def test_a_place_that_passes_after_a_while_can_be_written() -> None:
    check_writable(HostileStore(Path("store"), Behaviour(faults=[Fault(errno.EIO)])))


def test_a_place_where_nothing_can_be_deleted_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)

    def refuse(_: str) -> None:
        raise PermissionError(errno.EACCES, "may not delete")

    monkeypatch.setattr(store, "delete", refuse)
    with pytest.raises(PermissionError, match=r"cannot be written to.*may not delete"):
        check_writable(store)


def test_what_a_wrong_place_said_is_said_even_if_it_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HostileStore(Path("store"), Behaviour(faults=[Fault(errno.ENOSPC)]))

    def refuse(_: str) -> None:
        raise PermissionError(errno.EACCES, "may not delete")

    monkeypatch.setattr(store, "delete", refuse)
    with pytest.raises(OSError, match="No space left"):
        check_writable(store)


# ---- parts of places -------------------------------------------------------------------------------------------------


@law
@given(st.sampled_from(ROOTS), BELOW)
def test_join_parent_and_name_are_each_others_inverse(root: str, below: list[str]) -> None:
    place = join(root, *below)
    assert name(place) == below[-1]
    assert join(parent(place), name(place)) == place
    assert join(join(root, *below[:-1]), below[-1]) == place
    assert place.startswith(root.rstrip("/"))
    top = place
    for _ in range(10):
        top = parent(top)
    assert parent(top) == top
    assert name(top) == ""


@pytest.mark.parametrize("below", ["..", "../x", "a/../../x", "/etc/passwd", "", ".", "a//b", "a/", "a\0"])
@pytest.mark.parametrize("root", ["/tmp", "s3://bucket", "memory://"])
def test_nothing_joins_its_way_out(root: str, below: str) -> None:
    with pytest.raises(ValueError, match="relative path"):
        join(root, below)


@pytest.mark.parametrize(
    ("place", "above", "last"),
    [
        ("/a/b", "/a", "b"),
        ("/a/b/", "/a", "b"),
        ("/a", "/", "a"),
        ("/", "/", ""),
        ("a/b", "a", "b"),
        ("s3://bucket/a", "s3://bucket", "a"),
        ("s3://bucket/a//b", "s3://bucket/a", "b"),
        ("s3://bucket", "s3://bucket", ""),
        ("s3://bucket/", "s3://bucket", ""),
        ("abfss://c@acc.dfs.core.windows.net/a/b", "abfss://c@acc.dfs.core.windows.net/a", "b"),
        ("memory://a/b", "memory://a", "b"),
        ("memory://a", "memory://", "a"),
        ("memory://", "memory://", ""),
        ("memory:///a/b", "memory:///a", "b"),
        ("file:///a", "file:///", "a"),
        ("dbfs:/Volumes/c", "dbfs:/Volumes", "c"),
    ],
)
def test_parts_of_a_place(place: str, above: str, last: str) -> None:
    assert (parent(place), name(place)) == (above, last)


def test_joining_keeps_a_url_whole() -> None:
    assert join("s3://bucket", "a/b", "c") == "s3://bucket/a/b/c"
    assert join("s3://bucket/a/") == "s3://bucket/a"
    assert join("memory://", "a") == "memory://a"
    assert join("/", "a") == "/a"
    assert places.VOLUME_FORM.startswith("/Volumes/")
