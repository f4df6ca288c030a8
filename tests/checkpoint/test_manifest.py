"""A manifest comes back as it was written, or not at all; a digest is that of the bytes, however they come."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from lightning_air.checkpoint import manifest as module
from lightning_air.checkpoint.manifest import Digest, FileRecord, Manifest, digest_bytes, digest_file
from lightning_air.checkpoint.untrusted import (
    BadCheckpointError,
    DamagedCheckpointError,
    NewerCheckpointError,
    UnsafeCheckpointError,
    check_name,
    shown,
)

RECORD = FileRecord(5, "0123456789abcdef" * 2)
counts = st.integers(0, 2**63)
parts = st.text(st.characters(categories=["L", "N"], include_characters="-_=. "), min_size=1, max_size=20).filter(
    lambda part: part not in {".", ".."} and part.isprintable()
)
names = st.lists(parts, min_size=1, max_size=3).map("/".join)
manifests = st.builds(
    Manifest,
    step=counts,
    epoch=counts,
    world_size=counts,
    sharding=st.text(),
    created_seconds=st.floats(0, 1e12),
    files=st.dictionaries(names, st.builds(FileRecord, counts, st.text("0123456789abcdef", min_size=32, max_size=32))),
)


def small(**changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "step": 300, "epoch": 2, "world_size": 8, "sharding": "fsdp", "created_seconds": 1.5,
        "files": {".metadata": RECORD, "__0_0.distcp": RECORD},
    }  # fmt: skip
    return Manifest(**values | changes)


def spelt(document: Any) -> bytes:
    """The bytes that a writer with other content, but the same rules, would write."""
    content = {key: value for key, value in document.items() if key != "digest"}
    digest = digest_bytes(json.dumps(content, sort_keys=True, indent=1).encode()).xxh3_128
    return json.dumps(content | {"digest": digest}, sort_keys=True, indent=1).encode()


# ---- round trip ------------------------------------------------------------------------------------------------------


@given(manifests)
def test_comes_back_as_it_was_written(manifest: Manifest) -> None:
    data = manifest.to_json()
    assert Manifest.from_json(data) == manifest
    assert Manifest.from_json(data).to_json() == data


def test_is_json_that_people_can_read() -> None:
    document = json.loads(small().to_json())
    assert document["step"] == 300
    assert document["format_version"] == 1
    assert document["files"]["__0_0.distcp"] == {"num_bytes": 5, "xxh3_128": RECORD.xxh3_128}


def test_size_is_that_of_all_files() -> None:
    assert small().num_bytes == 10


def test_is_frozen_with_all_it_holds() -> None:
    files = {"a": RECORD}
    manifest = small(files=files)
    files["b"] = RECORD
    assert list(manifest.files) == ["a"]
    with pytest.raises(TypeError):
        manifest.files["b"] = RECORD


# ---- damage ----------------------------------------------------------------------------------------------------------


def test_every_flipped_bit_is_noticed() -> None:
    data = small().to_json()
    for position in range(len(data)):
        for bit in range(8):
            altered = bytearray(data)
            altered[position] ^= 1 << bit
            with pytest.raises(BadCheckpointError):
                Manifest.from_json(bytes(altered))


def test_every_truncation_is_noticed() -> None:
    data = small().to_json()
    for length in range(len(data)):
        with pytest.raises(DamagedCheckpointError, match=r"there: m\.json is not as it was written"):
            Manifest.from_json(data[:length], source="there: m.json")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_manifest_or_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(BadCheckpointError):
        Manifest.from_json(data)


@pytest.mark.parametrize(
    "data",
    [
        small().to_json() + b" ",
        b" " + small().to_json(),
        json.dumps(json.loads(small().to_json())).encode(),
        small().to_json().replace(b'"step": 300', b'"step": 300,\n "step": 300'),
        b"[" * 100_000,
        b"NaN",
        b'{"a": 1e999}',
        b"9" * 5000,
        b"null",
        b"\xff\xfe{\x00}\x00",
    ],
)
def test_other_spellings_are_no_manifest(data: bytes) -> None:
    with pytest.raises(DamagedCheckpointError):
        Manifest.from_json(data)


@pytest.mark.parametrize("key", ["step", "files", "created_seconds", "sharding", "format_version"])
def test_missing_key_is_named(key: str) -> None:
    document = json.loads(small().to_json())
    del document[key]
    with pytest.raises(DamagedCheckpointError, match=key):
        Manifest.from_json(spelt(document))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"step": -1}, "step must be a whole number from 0, got -1"),
        ({"step": True}, "step must be .* got True"),
        ({"epoch": 1.0}, "epoch"),
        ({"world_size": "8"}, "world_size"),
        ({"sharding": 3}, "sharding must be text, got 3"),
        ({"created_seconds": "now"}, "created_seconds"),
        ({"created_seconds": -1.0}, "created_seconds"),
        ({"files": []}, "wrong kind"),
        ({"files": {"a": 3}}, "wrong kind"),
        ({"files": {"a": {"num_bytes": 1}}}, "xxh3_128"),
        ({"files": {"a": {"num_bytes": -1, "xxh3_128": "0" * 32}}}, "num_bytes"),
        ({"files": {"a": {"num_bytes": 1, "xxh3_128": "0" * 31}}}, "xxh3_128"),
        ({"files": {"a": {"num_bytes": 1, "xxh3_128": "A" * 32}}}, "xxh3_128"),
        ({"files": {"manifest.json": {"num_bytes": 1, "xxh3_128": "0" * 32}}}, "cannot list itself"),
        ({"step": 10**400}, None),
    ],
)
def test_wrong_value_is_named_though_the_digest_is_right(change: dict[str, Any], match: str | None) -> None:
    data = spelt(json.loads(small().to_json()) | change)
    if match is None:
        assert Manifest.from_json(data).step == 10**400
    else:
        with pytest.raises(DamagedCheckpointError, match=match):
            Manifest.from_json(data)


@pytest.mark.parametrize("change", [{"created_seconds": math.nan}, {"created_seconds": math.inf}, {"step": None}])
def test_writer_is_told_of_a_wrong_value(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        small(**change)


# ---- versions --------------------------------------------------------------------------------------------------------


def test_newer_format_is_refused_by_number() -> None:
    data = spelt(json.loads(small().to_json()) | {"format_version": 2, "anything": [1]})
    with pytest.raises(NewerCheckpointError, match=r"m has format version 2, .* up to 1\. Update lightning_air"):
        Manifest.from_json(data, source="m")


def test_an_altered_version_is_damage_and_no_newer_format() -> None:
    data = small().to_json()
    for digit in b"2357":
        altered = data.replace(b'"format_version": 1', b'"format_version": ' + bytes([digit]))
        with pytest.raises(DamagedCheckpointError, match="is not as it was written"):
            Manifest.from_json(altered)


def test_unknown_keys_are_covered_by_the_digest_and_then_ignored() -> None:
    data = spelt(json.loads(small().to_json()) | {"model": "llama", "files2": {"../x": 1}})
    assert Manifest.from_json(data) == small()
    with pytest.raises(DamagedCheckpointError):
        Manifest.from_json(data.replace(b"llama", b"llamb"))


# ---- names -----------------------------------------------------------------------------------------------------------

UNSAFE_NAMES = {
    "": "is empty",
    "/etc/passwd": "is absolute",
    "..": "leads out",
    "../x": "leads out",
    "a/../../x": "leads out",
    "a/..": "leads out",
    "a\\b": "backslash",
    "..\\x": "backslash",
    "C:x": "drive",
    "C:/x": "drive",
    "a\0b": "printed",
    "a\nb": "printed",
    "a\u202eb": "printed",
    "a\ud800": "printed",
    "./a": "not normalised",
    "a/./b": "not normalised",
    "a//b": "not normalised",
    "a/": "not normalised",
    ".": "not normalised",
    "s3://bucket/x": "not normalised",
    "//server/share": "drive|absolute",
}


@pytest.mark.parametrize("name", UNSAFE_NAMES)
def test_name_that_leads_elsewhere_is_refused_by_name(name: str) -> None:
    document = json.loads(small().to_json())
    document["files"][name] = {"num_bytes": 1, "xxh3_128": "0" * 32}
    with pytest.raises(UnsafeCheckpointError, match=UNSAFE_NAMES[name]) as caught:
        Manifest.from_json(spelt(document), source="here/manifest.json")
    assert f"here/manifest.json names the file {name!r}" in str(caught.value)
    with pytest.raises(UnsafeCheckpointError):
        small(files={name: RECORD})


@pytest.mark.parametrize(
    "name", ["a", ".metadata", "__0_0.distcp", "a/b.c", "...", "a..b", "epoch=1-step=2", "größe", "~"]
)
def test_plain_name_is_taken(name: str) -> None:
    assert check_name(name, source="m") == name


@given(names)
def test_any_normalised_path_is_taken(name: str) -> None:
    assert check_name(name, source="m") == name


@pytest.mark.parametrize("value", [None, 3, b"a", ["a"]])
def test_name_that_is_no_text_is_refused(value: Any) -> None:
    with pytest.raises(UnsafeCheckpointError, match="is no text"):
        check_name(value, source="m")


def test_shown_is_short_and_never_runs_anything() -> None:
    class Hostile:
        def __repr__(self) -> str:
            raise AssertionError

    assert len(shown("x" * 10**6)) < 300
    assert shown(10**5000) == "a huge number"
    assert shown(Hostile()) == "a Hostile"


# ---- digests ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=300)))
def test_digest_is_the_same_in_any_pieces(pieces: list[bytes]) -> None:
    digest = Digest()
    for piece in pieces:
        digest.update(memoryview(piece))
    whole = b"".join(pieces)
    assert digest.record() == digest_bytes(whole) == FileRecord(len(whole), xxhash.xxh3_128_hexdigest(whole))


def test_digest_takes_a_tensors_memory_as_it_is() -> None:
    array = memoryview(bytearray(16)).cast("f")
    digest = Digest()
    digest.update(array)
    assert digest.record() == digest_bytes(bytes(16))


@pytest.mark.parametrize("num_bytes", [0, 1, 99, 100, 101, 350])
def test_file_is_read_in_blocks(num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK_BYTES", 100)
    monkeypatch.setattr(module, "_MIN_BLOCK_BYTES", 1)
    data = bytes(range(256)) * 2
    path = tmp_path / "file"
    path.write_bytes(data[:num_bytes])
    blocks: list[int] = []
    assert digest_file(path, on_block=blocks.append) == digest_bytes(data[:num_bytes])
    assert sum(blocks) == num_bytes
    assert max(blocks, default=0) <= 100


def test_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        digest_file(tmp_path / "none")
