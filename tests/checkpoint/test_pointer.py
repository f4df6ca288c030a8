"""A pointer file leads to the checkpoint beside it, and to nothing else."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_air.checkpoint.local_store import LocalStore
from lightning_air.checkpoint.pointer import PointerError, read_pointer, resolve_pointer, write_pointer
from lightning_air.checkpoint.store import Store
from lightning_air.checkpoint.untrusted import BadCheckpointError, DamagedCheckpointError, UnsafeCheckpointError
from tests.checkpoint.samples import RemoteStore, save_ours

LAST = "last.ckpt"


@pytest.fixture(params=[LocalStore, RemoteStore])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    store: Store = request.param(tmp_path)
    return store


def pointing(target: object) -> bytes:
    return json.dumps({"lightning_air_pointer": target}).encode()


def test_leads_to_what_was_written(store: Store, tmp_path: Path) -> None:
    save_ours(tmp_path / "step=1.ckpt")
    write_pointer(store, LAST, "step=1.ckpt")
    assert read_pointer(store, LAST) == "step=1.ckpt"
    assert resolve_pointer(store, LAST) == "step=1.ckpt"
    assert json.loads((tmp_path / LAST).read_bytes()) == {"lightning_air_pointer": "step=1.ckpt"}


def test_is_replaced(store: Store, tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(b"PK")
    write_pointer(store, LAST, "b.ckpt")
    write_pointer(store, LAST, "a.ckpt")
    assert resolve_pointer(store, LAST) == "a.ckpt"


def test_pointers_may_follow_each_other(store: Store, tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(b"PK")
    write_pointer(store, "best.ckpt", "a.ckpt")
    write_pointer(store, LAST, "best.ckpt")
    assert resolve_pointer(store, LAST) == "a.ckpt"


@pytest.mark.parametrize(
    "content",
    [b"PK\x03\x04" + bytes(100), b"", b"\x80\x02N.", b"[1]", b"{" * 5000, b"x" * 10_000],
    ids=lambda each: each[:4],
)
def test_what_is_no_pointer_stands_for_itself(content: bytes, store: Store, tmp_path: Path) -> None:
    (tmp_path / LAST).write_bytes(content)
    assert read_pointer(store, LAST) is None
    assert resolve_pointer(store, LAST) == LAST


def test_folder_and_nothing_are_no_pointers(store: Store, tmp_path: Path) -> None:
    (tmp_path / "folder.ckpt").mkdir()
    assert read_pointer(store, "folder.ckpt") is None
    assert read_pointer(store, "nothing.ckpt") is None


def test_large_file_is_not_read_to_find_out(tmp_path: Path) -> None:
    (tmp_path / LAST).write_bytes(b"{" + b" " * 5000 + b"}")
    store = RemoteStore(tmp_path)
    assert read_pointer(store, LAST) is None
    assert ("read", LAST) not in store.calls


def test_circle_is_an_error_that_shows_it(store: Store) -> None:
    write_pointer(store, "a", "b")
    write_pointer(store, "b", "c")
    write_pointer(store, "c", "b")
    with pytest.raises(PointerError, match=r"a leads in a circle: a → b → c → b\. Name a checkpoint"):
        resolve_pointer(store, "a")


def test_pointer_to_itself_is_not_written_and_not_followed(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot point to itself"):
        write_pointer(store, LAST, LAST)
    (tmp_path / LAST).write_bytes(pointing(LAST))
    with pytest.raises(PointerError, match="circle"):
        resolve_pointer(store, LAST)


@pytest.mark.parametrize("is_unpublished", [True, False])
def test_pointer_to_nothing_is_an_error_that_says_so(is_unpublished: bool, store: Store, tmp_path: Path) -> None:
    if is_unpublished:
        (save_ours(tmp_path / "step=1.ckpt") / ".metadata").unlink()
    write_pointer(store, LAST, "step=1.ckpt")
    with pytest.raises(PointerError, match=r"last\.ckpt points to 'step=1\.ckpt', where no published checkpoint is"):
        resolve_pointer(store, LAST)


@pytest.mark.parametrize(
    "target", ["../x", "/etc/passwd", "a/b", "a\\b", "", ".", "..", "C:x", "a\0", None, 3, ["a"], {"a": 1}]
)
def test_pointer_out_of_its_folder_is_refused_by_name(target: object, store: Store, tmp_path: Path) -> None:
    (tmp_path / LAST).write_bytes(pointing(target))
    with pytest.raises(UnsafeCheckpointError) as caught:
        resolve_pointer(store, LAST)
    assert f"{store.root}/{LAST}" in str(caught.value)
    with pytest.raises(UnsafeCheckpointError):
        write_pointer(store, LAST, target)  # type: ignore[arg-type]


def test_name_that_would_not_be_read_again_is_not_written(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="5000 characters"):
        write_pointer(store, LAST, "x" * 5000)
    assert not (tmp_path / LAST).exists()


@pytest.mark.parametrize(
    "content", [b"{", b"{}", b'{"a": 1}', b'{"lightning_air_pointe', b"{" * 4000, b"{\xff}"], ids=len
)
def test_altered_pointer_is_an_error_that_says_so(content: bytes, store: Store, tmp_path: Path) -> None:
    (tmp_path / LAST).write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="neither a checkpoint nor a whole pointer"):
        resolve_pointer(store, LAST)


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    save_ours(tmp_path / "step=1.ckpt")
    store = LocalStore(tmp_path)
    data = pointing("step=1.ckpt")
    for position in range(len(data)):
        for bit in range(8):
            altered = bytearray(data)
            altered[position] ^= 1 << bit
            (tmp_path / LAST).write_bytes(altered)
            try:
                found = resolve_pointer(store, LAST)
            except BadCheckpointError:
                continue
            # No longer taken for a pointer, and no checkpoint either; or spelt in another way.
            assert found == (LAST if position == 0 else "step=1.ckpt")


@given(st.binary(max_size=100).map(lambda data: b"{" + data))
def test_any_bytes_are_a_pointer_or_an_error_of_ours(data: bytes) -> None:
    class One(RemoteStore):
        def read(self, name: str) -> bytes:
            return data

        def num_bytes(self, name: str) -> int | None:
            return len(data) if name == LAST else None

    with pytest.raises(BadCheckpointError):
        resolve_pointer(One(Path("nowhere")), LAST)
