"""What DCP and `torch.save` write is read as they read it; what could run code is refused by name and does not run."""

import builtins
import codecs
import collections
import copy
import dataclasses
import errno
import functools
import io
import operator
import os
import pickle
import pickletools
import re
import resource
import shutil
import struct
import tarfile
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_air.checkpoint import metadata_file, pickle_machine
from lightning_air.checkpoint.pickle_names import named_globals, runs_code
from lightning_air.checkpoint.safe_pickle import load_metadata, load_object, refused_names
from lightning_air.checkpoint.untrusted import BadCheckpointError, DamagedCheckpointError, UnsafeCheckpointError
from tests.checkpoint.samples import (
    METADATA_MODULE,
    Calls,
    dictionary,
    named,
    pickled,
    record,
    save_stock,
    small_state,
    text,
)

FILESYSTEM = "torch.distributed.checkpoint.filesystem"


def plain(value: Any) -> bytes:
    """The instructions that make a value, without the memory."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 2)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()[2:-1]


def metadata_of(
    size: tuple[int, ...] = (4,),
    chunks: list[tuple[tuple[int, ...], tuple[int, ...]]] | None = None,
    *,
    file: Any = "__0_0.distcp",
    **changes: Any,
) -> Metadata:
    """Metadata of one tensor, `w`."""
    boxes = [((0,) * len(size), size)] if chunks is None else chunks
    entry = TensorStorageMetadata(
        TensorProperties(dtype=torch.float32),
        torch.Size(size),
        [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes],
    )
    places = {MetadataIndex("w", offsets, 0): _StorageInfo(file, 0, 10) for offsets, _ in boxes}
    values: dict[str, Any] = {
        "state_dict_metadata": {"w": entry},
        "planner_data": {"w": ("w",)},
        "storage_data": places,
    }
    return Metadata(**values | changes)


def load(value: Any, protocol: int = 4) -> Metadata:
    return load_metadata(value if isinstance(value, bytes) else pickle.dumps(value, protocol), source="there/.metadata")


def same(found: Metadata, expected: Metadata) -> bool:
    for each in (found, expected):
        if each.storage_meta is not None and each.storage_meta.checkpoint_id is not None:
            each.storage_meta.checkpoint_id = str(each.storage_meta.checkpoint_id)
    return found == expected


# ---- .metadata as DCP writes it --------------------------------------------------------------------------------------

STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "tensors and objects": small_state,
    "no dimensions, no elements": lambda: {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 3)},
    "nested": lambda: {"optimizer_0": {"state": {"w": {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]}},
    "names": lambda: {"a.b": torch.ones(1), "größe": torch.ones(1), "x" * 300: torch.ones(1), "0": torch.ones(1)},
    "dtypes": lambda: {
        str(dtype): torch.empty(2, dtype=dtype)
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.uint16, torch.int64)
    },
    "not contiguous": lambda: {"w": torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last)},
    "many": lambda: {f"layers.{index}.weight": torch.ones(2) for index in range(300)},
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_is_read_as_dcp_reads_it(state: str, protocol: int, tmp_path: Path) -> None:
    save_stock(tmp_path / "saved", STATES[state]())
    data = (tmp_path / "saved" / ".metadata").read_bytes()
    expected = pickle.loads(data)
    assert isinstance(expected.storage_meta.checkpoint_id, PosixPath)
    assert same(load(pickle.dumps(expected, protocol)), expected)
    assert same(load(data), expected)


def test_dcp_loads_with_metadata_that_was_read_here(tmp_path: Path) -> None:
    class Reader(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Metadata:
            return load((tmp_path / "saved" / ".metadata").read_bytes())

    save_stock(tmp_path / "saved", small_state(5.0))
    state = small_state(0.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*assuming the intent is to load in a single process", UserWarning)
        dcp.load(state, storage_reader=Reader(tmp_path / "saved"), no_dist=True)
    assert torch.equal(state["state_dict"]["w"], torch.full((2, 3), 5.0))


def test_sharded_tensor_with_uneven_and_empty_chunks_is_read() -> None:
    expected = metadata_of((5, 2), [((0, 0), (3, 2)), ((3, 0), (2, 2)), ((5, 0), (0, 2))])
    assert load(expected) == expected


def test_fields_that_may_be_absent_are() -> None:
    expected = metadata_of(planner_data=None, storage_meta=None, version=None)
    assert load(expected) == expected
    index = next(iter(load(expected).storage_data))
    assert (index.fqn, index.offset, index.index) == ("w", torch.Size((0,)), 0)


def test_transform_descriptors_are_kept() -> None:
    expected = metadata_of()
    for info in expected.storage_data.values():
        info.transform_descriptors = ["stream.zstd"]
    assert load(expected) == expected


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
@pytest.mark.parametrize(("name", "cls"), [("PosixPath", PurePosixPath), ("WindowsPath", PureWindowsPath)])
def test_writers_path_becomes_one_that_touches_no_disk(module: str, name: str, cls: type) -> None:
    path = named(module, name) + text("/") + text("tmp") + text("x") + pickle.TUPLE3 + pickle.REDUCE
    meta = record("StorageMeta", dictionary(checkpoint_id=path, modules=pickle.EMPTY_LIST))
    data = pickled(record("Metadata", dictionary(state_dict_metadata=b"}", storage_data=b"}", storage_meta=meta)))
    found = load(data).storage_meta
    assert found is not None
    assert type(found.checkpoint_id) is cls
    assert not hasattr(found.checkpoint_id, "unlink")


def test_field_that_no_torch_knows_is_left_out() -> None:
    value = metadata_of()
    value.mcore_data = {"x": (1, ["y"])}
    found = load(value)
    assert found == metadata_of()
    assert not hasattr(found, "mcore_data")


@dataclasses.dataclass
class NewerInfo(_StorageInfo):
    """As a newer torch may have it."""

    checksum: Any = None


@pytest.mark.parametrize("checksum", [None, 3, "a"])
def test_field_of_a_newer_torch_is_kept_if_it_is_a_scalar(checksum: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = metadata_file._NAMES | {
        (FILESYSTEM, "_StorageInfo"): pickle_machine.Record(NewerInfo, fill_newer),
        (NewerInfo.__module__, "NewerInfo"): pickle_machine.Record(NewerInfo, fill_newer),
    }
    monkeypatch.setattr(metadata_file, "_NAMES", names)
    info = pickle.dumps(NewerInfo("f", 0, 1, checksum=checksum), 4)
    found = pickle_machine.unpickle(info, names)
    assert getattr(found, "checksum", None) == checksum
    with pytest.raises(UnsafeCheckpointError, match="checksum of a NewerInfo"):
        pickle_machine.unpickle(pickle.dumps(NewerInfo("f", 0, 1, checksum=[1]), 4), names)


def fill_newer(target: Any, state: object) -> None:
    target.__dict__.update(metadata_file._fields(NewerInfo, state, metadata_file._INFO))


# ---- planted code ----------------------------------------------------------------------------------------------------


def planted(mark: Path) -> dict[str, tuple[Any, str]]:
    """Objects that call something when they are unpickled, most of them to make a file, and the name to be told."""
    command = f"touch {mark}"
    return {
        "os.system": (Calls(os.system, command), "system"),
        "eval": (Calls(builtins.eval, f"open({str(mark)!r}, 'w').close()"), "eval"),
        "exec": (Calls(builtins.exec, f"open({str(mark)!r}, 'w').close()"), "exec"),
        "open": (Calls(builtins.open, str(mark), "w"), "open"),
        "getattr": (
            Calls(builtins.getattr, "x", "upper"),
            "getattr",
        ),
        "import": (Calls(builtins.__import__, "antigravity_not_there"), "__import__"),
        "partial": (Calls(functools.partial(os.system, command)), "functools.partial"),
        "methodcaller": (Calls(operator.methodcaller("touch"), mark), "operator.methodcaller"),
        "path method": (Calls(Path.touch, mark), r"getattr|Path\.touch"),
        "codecs": (Calls(codecs.decode, b"eA==", "base64"), "codecs.decode"),
        "codecs open": (Calls(codecs.open, str(mark), "w"), "codecs.open"),
        "pickle": (Calls(pickle.loads, pickle.dumps(Calls(os.system, command))), "pickle.loads"),
        "shutil": (Calls(shutil.copyfile, "/etc/hostname", str(mark)), "shutil.copyfile"),
        "torch.save": (Calls(torch.save, 1, str(mark)), "torch.serialization.save"),
        "torch.load": (Calls(torch.load, str(mark), weights_only), "torch.serialization.load"),
        "torch.hub": (Calls(torch.hub.load, str(mark), "x"), "torch.hub.load"),
        "torch code": (Calls(torch.utils.collect_env.run, command), "torch.utils.collect_env.run"),
        "numpy": (Calls(np.save, str(mark), 1), "numpy.save"),
        "numpy scalar": (np.float64(1.5), "scalar"),
        "a class": (collections.OrderedDict(a=1), "collections.OrderedDict"),
        "a defaultdict": (collections.defaultdict(list), "collections.defaultdict"),
    }


weights_only = None
CODE = list(planted(Path("mark")))


def carriers(evil: Any) -> dict[str, Any]:
    """The places in a `.metadata` where a pickle may have anything."""
    return {
        "alone": evil,
        "an entry": metadata_of(state_dict_metadata={"w": evil}),
        "a key": metadata_of(state_dict_metadata={"w": BytesStorageMetadata(), "x": [evil]}),
        "planner data": metadata_of(planner_data=evil),
        "a place": metadata_of(storage_data={MetadataIndex("w", (0,)): evil}),
        "a file's name": metadata_of(file=evil),
        "storage meta": metadata_of(storage_meta=StorageMeta(checkpoint_id=evil)),
        "an unknown field": metadata_of(version=evil),
    }


@pytest.mark.parametrize("kind", CODE)
def test_planted_code_is_refused_by_name_and_does_not_run(kind: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    evil, name = planted(mark)[kind]
    for protocol in (0, 1, 2, 3, 4, 5):
        for where, carrier in carriers(evil).items():
            data = pickle.dumps(carrier, protocol)
            with pytest.raises(UnsafeCheckpointError) as caught:
                load(data)
            assert re.search(name, str(caught.value)), (where, protocol)
            assert str(caught.value).startswith("there/.metadata ")
    assert not mark.exists()


def test_the_planted_code_would_run_elsewhere(tmp_path: Path) -> None:
    for kind in ("os.system", "eval", "partial", "methodcaller", "path method", "pickle", "torch.save", "numpy"):
        mark = tmp_path / kind.replace(".", "-")
        pickle.loads(pickle.dumps(planted(mark)[kind][0]))
        assert mark.exists() or mark.with_name(f"{mark.name}.npy").exists(), kind


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch", "serialization.os.system"),
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo.__init__"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__class__"),
        ("torch.serialization", "_get_layout.__globals__"),
        ("torch.distributed", "checkpoint.metadata.Metadata"),
        ("pathlib", "Path"),
        ("pathlib", "PosixPath.unlink"),
        ("torch", "float32.__class__"),
        ("torch", "Tensor"),
        ("torch", "load"),
        ("builtins", "object"),
        ("", ""),
    ],
)
def test_dotted_and_neighbouring_names_are_refused(module: str, name: str) -> None:
    for data in (
        pickled(named(module, name)),
        b"\x80\x02" + pickle.GLOBAL + f"{module}\n{name}\n.".encode(),
        pickle.GLOBAL + f"{module}\n{name}\n".encode() + b"(S'x'\ntR.",
    ):
        with pytest.raises(UnsafeCheckpointError) as caught:
            load(data)
        assert f"{module}.{name}" in str(caught.value)


def test_error_says_what_to_do() -> None:
    with pytest.raises(
        UnsafeCheckpointError, match=r"Do not use this checkpoint, .* newer torch, update lightning_air"
    ):
        load(pickled(named("os", "system")))


# ---- the machine -----------------------------------------------------------------------------------------------------

KNOWN = """PROTO FRAME MARK GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD APPEND APPENDS SETITEM SETITEMS TUPLE TUPLE1 TUPLE2
TUPLE3 MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET SHORT_BINUNICODE BINUNICODE NONE NEWTRUE NEWFALSE BININT BININT1
BININT2 LONG1 EMPTY_TUPLE EMPTY_LIST EMPTY_DICT STOP""".split()  # noqa: SIM905


@pytest.mark.parametrize("opcode", pickletools.opcodes, ids=lambda opcode: opcode.name)
def test_instruction_that_no_metadata_needs_is_refused_by_name(opcode: Any) -> None:
    if opcode.name in KNOWN:
        return
    data = b"\x80\x04" + b"N" * 3 + b"(" + opcode.code.encode("latin1") + b"os\nsystem\n." + bytes(8)
    with pytest.raises(UnsafeCheckpointError, match=f"instruction {opcode.name}, which"):
        load(data)


def test_unsafe_instruction_is_refused_with_the_names_in_the_file() -> None:
    with pytest.raises(UnsafeCheckpointError, match=r"instruction STRING, .* names 'os\.system'"):
        load(b"(S'touch mark'\nios\nsystem\n.")


def test_byte_that_is_no_instruction_is_refused() -> None:
    with pytest.raises(UnsafeCheckpointError, match="0xff where an instruction"):
        load(b"\x80\x04\xff.")


SIZE = named("torch", "Size")
LAYOUT = named("torch.serialization", "_get_layout")
ENTRY = record(
    "TensorStorageMetadata",
    dictionary(properties=named(METADATA_MODULE, "TensorProperties"), size=SIZE + b")\x85R", chunks=pickle.EMPTY_LIST),
)
SET_ATTRIBUTE = b"N" + dictionary(cache=b"}", fill=b"N", __init__=SIZE, offset=SIZE) + pickle.TUPLE2 + pickle.BUILD

TRICKS: dict[str, bytes] = {
    "state of a class": named(METADATA_MODULE, "MetadataIndex") + SET_ATTRIBUTE,
    "state of a function": LAYOUT + dictionary(cache=b"}") + pickle.BUILD,
    "slots of a function": LAYOUT + SET_ATTRIBUTE,
    "state of a dtype": named("torch", "float32") + SET_ATTRIBUTE,
    "state of a memory format": named(METADATA_MODULE, "_MEM_FORMAT_ENCODING") + b"K\x00\x85R" + SET_ATTRIBUTE,
    "state of a size": SIZE + b")\x85R" + SET_ATTRIBUTE,
    "state of a path": named("pathlib", "PosixPath") + text("x") + b"\x85R" + SET_ATTRIBUTE,
    "state of a list": b"]" + SET_ATTRIBUTE,
    "a second state": record("BytesStorageMetadata", b"}") + b"}b",
    "slots of a record": record("MetadataIndex", b"N" + dictionary(fqn=text("w")) + b"\x86"),
    "a state that is no dictionary": record("MetadataIndex", text("w")),
    "call of a class": named(METADATA_MODULE, "MetadataIndex") + text("w") + b"\x85R",
    "call of a dtype": named("torch", "float32") + b")R",
    "call of a text": text("upper") + b")R",
    "call without a tuple": SIZE + b"]R",
    "object of a function": SIZE + b")\x81",
    "object with arguments": named(METADATA_MODULE, "MetadataIndex") + text("w") + b"\x85\x81",
    "object of an object": record("BytesStorageMetadata", b"}") + b")\x81",
    "class as a value": named(METADATA_MODULE, "Metadata"),
    "function as a value": SIZE,
    "append to a tuple": b")Na",
    "append to a dictionary": b"}Na",
    "items of a list": b"]NNs",
    "extend a record": record("BytesStorageMetadata", b"}") + b"(Ne",
    "layout that is none": LAYOUT + text("os") + b"\x85R",
    "layout by a list": LAYOUT + b"]\x85R",
    "layout by nothing": LAYOUT + b")R",
    "memory format that is none": named(METADATA_MODULE, "_MEM_FORMAT_ENCODING") + b"K\x09\x85R",
    "size of texts": SIZE + text("x") + b"\x85\x85R",
    "size of truth": SIZE + b"\x88\x85\x85R",
    "negative size": SIZE + b"J\xff\xff\xff\xff\x85\x85R",
    "huge size": SIZE + b"\x8a\x09" + bytes(8) + b"\x01\x85\x85R",
    "size of two": SIZE + b"))\x86R",
    "65 dimensions": SIZE + b"(" + b"K\x01" * 65 + b"t\x85R",
    "path of numbers": named("pathlib", "PosixPath") + b"K\x01\x85R",
    "entry without properties": ENTRY,
    "names by numbers": b"K\x01K\x02\x93",
    "a record without a state": named(METADATA_MODULE, "Metadata") + b")\x81",
    "nothing": b"",
    "two things": b"NN",
    "an open mark": b"(N",
    "a mark too few": b"Nt",
    "no stack": b"\x86",
    "memory that is not there": b"h\x07",
    "an odd item": b"}(Nu",
    "text that breaks off": b"\x8c\xff",
    "text that is none": b"\x8c\x01\xff",
    "long text that breaks off": b"X\xff\xff\xff\xffabc",
    "a line without an end": b"ctorch",
    "protocol 99": b"\x80\x63N",
    "a number": b"K\x01",
    "None": b"N",
}


@pytest.mark.parametrize("trick", TRICKS)
def test_trick_is_refused_and_changes_nothing(trick: str) -> None:
    before = [dict(vars(cls)) for cls in (Metadata, MetadataIndex, TensorProperties, BytesStorageMetadata)]
    cache = dict(vars(torch.serialization._get_layout))
    with pytest.raises(BadCheckpointError, match=r"^there/\.metadata "):
        load(pickled(TRICKS[trick]))
    assert [dict(vars(cls)) for cls in (Metadata, MetadataIndex, TensorProperties, BytesStorageMetadata)] == before
    assert vars(torch.serialization._get_layout) == cache


def test_size_of_very_many_dimensions_is_refused() -> None:
    with pytest.raises(DamagedCheckpointError, match="no list of sizes"):
        load(metadata_of((1,) * 65))
    assert load(metadata_of((1,) * 64)) == metadata_of((1,) * 64)


def test_bytes_behind_the_end_are_refused() -> None:
    with pytest.raises(DamagedCheckpointError, match="left over"):
        load(pickle.dumps(metadata_of()) + b".")


def test_list_that_changes_after_it_was_checked_changes_nothing() -> None:
    data = pickle.dumps(metadata_of((0,), []), 2)
    assert load(data).state_dict_metadata["w"].chunks == []
    # The same list is taken from the memory behind its owner's BUILD, and a chunk outside of the tensor put in.
    chunk = record("ChunkStorageMetadata", dictionary(offsets=SIZE + b"K\x09\x85\x85R", sizes=SIZE + b"K\x09\x85\x85R"))
    entry = record(
        "TensorStorageMetadata",
        dictionary(
            properties=plain(TensorProperties(dtype=torch.float32)), size=SIZE + b"K\x00\x85\x85R", chunks=b"]\x94"
        ),
    )
    late = b"h\x00" + chunk + b"a\x85"  # a tuple that nobody looks at: the value of a field that no class has
    data = pickled(
        record("Metadata", dictionary(state_dict_metadata=dictionary(w=entry), storage_data=b"}", late=late))
    )
    assert load(data).state_dict_metadata["w"].chunks == []


def test_record_that_is_filled_after_it_was_taken_is_refused() -> None:
    index = named(METADATA_MODULE, "MetadataIndex") + b")\x81\x94"
    info = record("_StorageInfo", dictionary(relative_path=text("f"), offset=b"K\x00", length=b"K\x01"), FILESYSTEM)
    places = b"}" + index + info + b"s"
    late = b"h\x00" + dictionary(fqn=text("w")) + b"b"
    data = pickled(record("Metadata", dictionary(state_dict_metadata=b"}", storage_data=places)) + late + b"\x86\x85")
    with pytest.raises(DamagedCheckpointError, match="as a key where a MetadataIndex is due"):
        load(data)


# ---- bombs -----------------------------------------------------------------------------------------------------------

MANY = 200_000
DEEP = 300_000
LONG_TEXT = b"X" + struct.pack("<I", MANY) + b"x" * MANY
ZERO = SIZE + b"K\x00\x85\x85R"
# Memory: 0 a chunk, 1 a list that holds it often, 2 properties, 3 the class of a tensor's entry.
SHARED_LIST = (
    (record("ChunkStorageMetadata", dictionary(offsets=ZERO, sizes=ZERO)) + b"\x94]\x94(" + b"h\x00" * MANY + b"e")
    + plain(TensorProperties(dtype=torch.float32))
    + b"\x94"
    + named(METADATA_MODULE, "TensorStorageMetadata")
    + b"\x94"
)
SHARING = b"h\x03)\x81" + dictionary(chunks=b"h\x01", properties=b"h\x02", size=ZERO) + b"b"
OUT_OF_PROPORTION = "out of all proportion"

BOMBS: dict[str, tuple[bytes, str]] = {
    "memory for two billion": (b"Nr\xff\xff\xff\x7f", "memorises object 2147483647"),
    "memory in disorder": (b"Nq\x01", "memorises object 1"),
    "nested tuples as a key": (b"}" + b")" + b"\x85" * DEEP + b"Ns", "instead of DCP's Metadata"),
    "nested tuples as a value": (b")" + b"\x85" * DEEP, "instead of DCP's Metadata"),
    "nested tuples as a state": (record("Metadata", b")" + b"\x85" * DEEP), "a dictionary is due"),
    "nested tuples as arguments": (named(METADATA_MODULE, "Metadata") + b")" + b"\x85" * DEEP + b"\x81", "makes an"),
    "nested lists": (b"]" + b"]" * DEEP + b"a" * DEEP, "instead of DCP's Metadata"),
    "nested marks": (b"(" * DEEP, "nested deeper"),
    "doubled tuples as a key": (
        b")\x94" + b"".join(b"h%ch%c\x86\x94" % (index, index) for index in range(200)) + b"}h\xc8Ns",
        "left over",
    ),
    "a text that is shared": (
        LONG_TEXT + b"\x94" + named("pathlib", "PosixPath") + b"\x94" + b"h\x01h\x00\x85R" * 20_000, OUT_OF_PROPORTION
    ),
    "a list that is shared": (SHARED_LIST + SHARING * 5_000, OUT_OF_PROPORTION),
    "a state that is shared": (
        dictionary(**{f"k{index}": b"N" for index in range(9_000)}) + b"\x94"
        + named(METADATA_MODULE, "BytesStorageMetadata") + b"\x94" + b"h\x01)\x81h\x00b" * 20_000,
        OUT_OF_PROPORTION,
    ),
    "a huge number": (b"\x8a\xff" + b"\x7f" * 255, "a huge number instead"),
    "a bytearray of an exabyte": (b"\x96" + struct.pack("<Q", 2**60), "instruction BYTEARRAY8"),
    "a text of an exabyte": (b"\x8d" + struct.pack("<Q", 2**60), "instruction BINUNICODE8"),
    "a frame of an exabyte": (b"\x95" + struct.pack("<Q", 2**60), "left over"),
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_bomb_takes_neither_time_nor_memory(bomb: str) -> None:
    body, match = BOMBS[bomb]
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    begun = time.process_time()
    with pytest.raises(BadCheckpointError, match=match):
        load(pickled(body))
    assert time.process_time() - begun < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before_bytes < 300e6


def test_entries_that_share_a_little_are_no_bomb() -> None:
    properties = TensorProperties(dtype=torch.float32)
    size = torch.Size((1,) * 30)
    chunks = [ChunkStorageMetadata(torch.Size((0,) * 30), size)]
    entry = TensorStorageMetadata(properties, size, chunks)
    info = _StorageInfo("a long name of a file, as everything in it shares it", 0, 1)
    names = [str(index) for index in range(100)]
    value = Metadata(
        dict.fromkeys(names, entry),
        dict.fromkeys(names, ("w",) * 50),
        {MetadataIndex(name, (0,) * 30): info for name in names},
    )
    assert load(value) == value


def test_work_grows_with_the_length_of_the_file_only() -> None:
    def seconds(num_tensors: int) -> float:
        boxes = [((index,), (1,)) for index in range(num_tensors)]
        data = pickle.dumps(metadata_of((num_tensors,), boxes))
        begun = time.process_time()
        load(data)
        return time.process_time() - begun

    seconds(100)
    assert seconds(4_000) < 8 * 4 * max(seconds(1_000), 0.01)


# ---- what does not fit together --------------------------------------------------------------------------------------

W: Any = MetadataIndex("w", (0,), 0)
INFO = _StorageInfo("f", 0, 10)

MISFITS: dict[str, tuple[Any, str]] = {
    "chunk behind the end": (metadata_of((4,), [((1,), (4,))]), "leaves its tensor"),
    "chunk of other dimensions": (metadata_of((4,), [((0, 0), (2, 2))]), "leaves its tensor"),
    "chunk with fewer sizes": (metadata_of((4,), [((0,), (2, 2))]), "differ in number"),
    "element that is nowhere": (metadata_of((4,), [((0,), (3,))]), "4 elements whose chunks have 3"),
    "element that is there twice": (metadata_of((4,), [((0,), (4,)), ((1,), (2,))]), "chunks have 6"),
    "no chunk at all": (metadata_of((4,), []), "chunks have 0"),
    "tensor that no memory holds": (metadata_of((2**40, 2**40)), "which no memory holds"),
    "tensor without a place": (metadata_of(storage_data={}), "does not say in which file"),
    "object without a place": (
        metadata_of(state_dict_metadata={"n": BytesStorageMetadata()}, storage_data={}),
        "'n', but does not say in which file",
    ),
    "place of nothing": (metadata_of(storage_data={W: INFO, MetadataIndex("x", (0,)): INFO}), "to 'x', but lists no"),
    "place outside of its tensor": (metadata_of(storage_data={W: INFO, MetadataIndex("w", (5,)): INFO}), "lists no"),
    "tensor's place without an offset": (metadata_of(storage_data={MetadataIndex("w"): INFO}), "lists no such"),
    "no places": (metadata_of(storage_data=None), "None as storage_data"),
    "places by name": (metadata_of(storage_data={"w": INFO}), "where a MetadataIndex is due"),
    "places that are none": (metadata_of(storage_data={W: "f"}), "where a _StorageInfo is due"),
    "entry that is none": (metadata_of(state_dict_metadata={"w": "x"}), "where a TensorStorageMetadata is due"),
    "entry by number": (metadata_of(state_dict_metadata={1: BytesStorageMetadata()}), "no text or there twice"),
    "entries that are a list": (metadata_of(state_dict_metadata=["w"]), "state_dict_metadata of a Metadata"),
    "path that is a list": (metadata_of(planner_data={"w": ["w"]}), "no paths through a state dict"),
    "path of paths": (metadata_of(planner_data={"w": (("w",),)}), "no paths through a state dict"),
    "path of a thousand": (metadata_of(planner_data={"w": ("w",) * 1000}), "no paths through a state dict"),
    "planner data that are none": (metadata_of(planner_data=3), "3 as planner_data"),
    "version that is none": (metadata_of(version=3), "3 as version"),
    "storage meta that is none": (metadata_of(storage_meta="x"), "as storage_meta"),
    "modules that are none": (metadata_of(storage_meta=StorageMeta(modules=[W])), "a module that is no text"),
    "chunk that is none": (
        metadata_of(state_dict_metadata={"w": TensorStorageMetadata(TensorProperties(), torch.Size((0,)), [W])}),
        "a MetadataIndex as a chunk",
    ),
    "properties that are none": (
        metadata_of(state_dict_metadata={"w": TensorStorageMetadata("x", torch.Size((0,)), [])}), "as properties",
    ),
    "index that is none": (metadata_of(storage_data={MetadataIndex("w", (0,), "x"): INFO}), "as index"),
    "negative offset": (metadata_of(storage_data={W: _StorageInfo("f", -1, 1)}), "an offset of -1"),
    "negative length": (metadata_of(storage_data={W: _StorageInfo("f", 0, -1)}), "a length of -1"),
    "huge offset": (metadata_of(storage_data={W: _StorageInfo("f", 2**63, 1)}), "an offset of"),
    "true length": (metadata_of(storage_data={W: _StorageInfo("f", 0, True)}), "as length"),
    "descriptor that is none": (metadata_of(storage_data={W: _StorageInfo("f", 0, 1, [W])}), "that is no text"),
    "no Metadata": (MetadataIndex("w"), "instead of DCP's Metadata"),
}  # fmt: skip


@pytest.mark.parametrize("misfit", MISFITS)
def test_metadata_that_does_not_fit_together_is_refused(misfit: str) -> None:
    value, match = MISFITS[misfit]
    with pytest.raises(DamagedCheckpointError, match=match):
        load(value)


@pytest.mark.parametrize("file", ["../x", "/etc/passwd", "a/../../x", "C:\\x", "a\0b", "", "a//b", "./a", "~/../x"])
def test_file_outside_of_the_checkpoint_is_refused_by_name(file: str) -> None:
    with pytest.raises(UnsafeCheckpointError) as caught:
        load(metadata_of(file=file))
    assert repr(file) in str(caught.value)


# ---- damage ----------------------------------------------------------------------------------------------------------


def refused_or_fine(data: bytes) -> bool:
    try:
        load(data)
    except BadCheckpointError:
        return True
    return False


def test_every_flipped_bit_is_an_error_of_ours_or_harmless() -> None:
    data = pickle.dumps(metadata_of())
    refused = 0
    for position in range(len(data)):
        for bit in range(8):
            altered = bytearray(data)
            altered[position] ^= 1 << bit
            refused += refused_or_fine(bytes(altered))
    assert refused > 0.8 * 8 * len(data)


def test_every_truncation_is_refused() -> None:
    data = pickle.dumps(metadata_of())
    for length in range(len(data)):
        with pytest.raises(BadCheckpointError):
            load(data[:length])


@given(st.binary(max_size=300))
def test_any_bytes_are_metadata_or_an_error_of_ours(data: bytes) -> None:
    assert refused_or_fine(data)


INSTRUCTIONS = [bytes([code]) for code in pickle_machine._INSTRUCTIONS] + [
    b"h\x00",
    b"\x94",
    b"K\x01",
    b")",
    SIZE,
    LAYOUT,
]
PIECES = st.sampled_from([*INSTRUCTIONS, *(record(cls, b"") for cls in ("MetadataIndex", "ChunkStorageMetadata"))])


@settings(max_examples=500)
@given(st.lists(PIECES, max_size=30).map(b"".join))
def test_any_instructions_are_metadata_or_an_error_of_ours(body: bytes) -> None:
    assert refused_or_fine(pickled(body))


# ---- torch.save ------------------------------------------------------------------------------------------------------


class Settings:
    """A user's own class, as hyperparameters have them."""

    def __init__(self, width: int) -> None:
        self.width = width


def saved(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def repacked(
    data: bytes, change: dict[str, bytes | None], *, compression: int = zipfile.ZIP_STORED, first: bytes = b""
) -> bytes:
    """An archive with other contents; `change` replaces, adds or (None) drops a part."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()
        top = names[0].split("/")[0]
        parts = {name: archive.read(name) for name in names} | {
            f"{top}/{name}": content for name, content in change.items()
        }
    buffer = io.BytesIO(first)
    buffer.seek(len(first))
    with zipfile.ZipFile(buffer, "a" if first else "w", compression) as archive:
        for name, content in parts.items():
            if content is not None:
                archive.writestr(name, content)
    return buffer.getvalue()


@pytest.mark.parametrize("weights", [None, True, False])
@pytest.mark.parametrize("as_stream", [True, False])
def test_object_is_read_as_torch_reads_it(weights: bool | None, as_stream: bool) -> None:
    value = {"w": torch.arange(6.0).reshape(2, 3).t(), "n": [1, 2.5, None, "x", (True,)], "d": torch.float16}
    data = saved(value)
    found = load_object(io.BytesIO(data) if as_stream else data, source="meta.pt", weights_only=weights)
    assert torch.equal(found.pop("w"), value.pop("w"))
    assert found == value


def test_object_without_checksums_is_read() -> None:
    computes = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        data = saved({"w": torch.ones(3)})
    finally:
        torch.serialization.set_crc32_options(computes)
    assert torch.equal(load_object(data, source="x")["w"], torch.ones(3))


@pytest.mark.parametrize("kind", [kind for kind in CODE if not kind.startswith("a ")])
def test_planted_code_in_an_object_is_refused_by_name_and_does_not_run(kind: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    evil, name = planted(mark)[kind]
    value = {"epoch": 1, "callbacks": [evil]}
    bare = [pickle.dumps(value, protocol) for protocol in range(6)]
    legacy = saved(value, _use_new_zipfile_serialization=False)
    archives = [saved(value, pickle_protocol=protocol) for protocol in (2, 3, 4, 5)]
    for data in [*archives, legacy, *bare]:
        with pytest.raises(UnsafeCheckpointError) as caught:
            load_object(data, source="there/meta.pt")
        assert re.search(name, str(caught.value))
        assert str(caught.value).startswith("there/meta.pt ")
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["os.system", "eval", "partial", "torch.save", "torch.hub", "shutil"])
def test_nobody_is_told_how_to_allow_code(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UnsafeCheckpointError, match="which is code and no data") as caught:
        load_object(saved(planted(tmp_path / "mark")[kind][0]), source="x")
    assert "add_safe_globals" not in str(caught.value)


def test_users_type_is_refused_with_how_to_allow_it() -> None:
    data = saved({"hyper_parameters": Settings(3), "also": np.float64(1.0)})
    with pytest.raises(UnsafeCheckpointError) as caught:
        load_object(data, source="there/meta.pt")
    name = f"{Settings.__module__}.Settings"
    message = str(caught.value)
    assert name in message
    assert "scalar" in message
    assert "torch.serialization.add_safe_globals([" in message
    assert "weights_only=False" in message
    assert refused_names(io.BytesIO(data)) == sorted({name, *refused_names(io.BytesIO(saved(np.float64(1.0))))})


def test_users_type_is_loaded_once_it_is_allowed() -> None:
    data = saved(Settings(3))
    with torch.serialization.safe_globals([Settings]):
        assert load_object(data, source="x").width == 3
        assert refused_names(io.BytesIO(data)) == []
    assert load_object(data, source="x", weights_only=False).width == 3


def test_environment_does_not_open_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(UnsafeCheckpointError):
        load_object(saved(Settings(3)), source="x")


def test_archives_that_torch_save_does_not_write_are_refused() -> None:
    data = saved({"w": torch.zeros(1000)})
    for altered, match in {
        "torchscript": (repacked(data, {"constants.pkl": b"\x80\x02N."}), "TorchScript archive, which is code"),
        "compressed": (repacked(data, {}, compression=zipfile.ZIP_DEFLATED), "is a compressed archive"),
        "no pickle": (repacked(data, {"data.pkl": None}), "none of torch.save"),
        "case": (repacked(data, {"DATA.pkl": b"\x80\x02N."}), "a name is there twice"),
        "prefix": (repacked(data, {}, first=b"PK\x03\x04" + bytes(99)), "none of torch.save"),
        "empty": (repacked(data, dict.fromkeys(part_names(data))), "of another kind"),
    }.values():
        with pytest.raises(BadCheckpointError, match=match):
            load_object(altered, source="x.ckpt")


def part_names(data: bytes) -> list[str]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [name.partition("/")[2] for name in archive.namelist()]


def test_zip_bomb_is_not_unpacked() -> None:
    data = saved({"w": torch.zeros(1)})
    bomb = repacked(data, {"data/0": bytes(300_000_000)}, compression=zipfile.ZIP_DEFLATED)
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert len(bomb) < 1_000_000
    with pytest.raises(UnsafeCheckpointError, match="compressed"):
        load_object(bomb, source="x.ckpt")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_bytes < 100_000


def test_parts_that_overlap_are_refused() -> None:
    buffer = io.BytesIO(saved({"w": torch.zeros(10_000)}))
    with zipfile.ZipFile(buffer, "a") as archive:
        large = max(archive.filelist, key=lambda entry: entry.file_size)
        for index in range(100):  # the same bytes under a hundred names
            entry = copy.copy(large)
            entry.filename = f"archive/data/{index + 10}"
            archive.filelist.append(entry)
        archive.writestr("archive/last", b"")
    with pytest.raises(UnsafeCheckpointError, match="it may fill the memory"):
        load_object(buffer.getvalue(), source="x.ckpt")


def test_legacy_formats_are_refused_with_what_to_do() -> None:
    legacy = saved({"w": torch.ones(2)}, _use_new_zipfile_serialization=False)
    with pytest.raises(BadCheckpointError, match="weights_only=False and save it again"):
        load_object(legacy, source="old.ckpt")
    assert torch.equal(load_object(legacy, source="old.ckpt", weights_only=False)["w"], torch.ones(2))


def test_tar_is_refused_and_unpacks_nothing(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("storages", "tensors", "pickle", "../escaped"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(DamagedCheckpointError, match="of another kind"):
        load_object(buffer.getvalue(), source="old.ckpt")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "data", [b"", b"PK", b"PK\x03\x04", bytes(1000), b'{"a": 1}', b"\x80\x02N.", b"PK\x05\x06" + bytes(18)]
)
@pytest.mark.parametrize("weights", [None, False])
def test_what_is_no_object_is_an_error_of_ours(data: bytes, weights: bool | None) -> None:
    with pytest.raises(BadCheckpointError, match=r"^there/x "):
        load_object(data, source="there/x", weights_only=weights)


def test_every_truncation_of_an_object_is_refused() -> None:
    data = saved({"w": torch.ones(2)})
    for length in range(0, len(data), 7):
        with pytest.raises(BadCheckpointError):
            load_object(data[:length], source="x")


def test_any_flipped_bit_of_an_object_is_an_error_of_ours_or_another_value() -> None:
    data = saved({"w": torch.ones(2), "x": [1, "a"]})
    for position in range(len(data)):
        altered = bytearray(data)
        altered[position] ^= 1 << position % 8
        try:
            load_object(bytes(altered), source="x")
        except BadCheckpointError:
            continue


@pytest.mark.parametrize("num_reads", [0, 5, 10, 15])
def test_stream_that_breaks_while_it_is_read_is_an_os_error(num_reads: int) -> None:
    left = num_reads

    class Breaking(io.BytesIO):
        def count(self) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(errno.EIO, "Input/output error")

        def readinto(self, buffer: Any) -> int:
            self.count()
            return super().readinto(buffer)

        def read(self, size: int | None = -1) -> bytes:
            self.count()
            return super().read(size)

    with pytest.raises(OSError, match="Input/output"):
        load_object(Breaking(saved([torch.ones(2) for _ in range(10)])), source="x")


# ---- names -----------------------------------------------------------------------------------------------------------


def test_names_are_told_from_several_pickles_on_end() -> None:
    data = pickle.dumps(1) + pickle.dumps(Calls(os.system, "x"), 0) + pickle.dumps(Calls(builtins.eval, "x"), 5) + b"?"
    assert named_globals(data) == ["posix.system", "builtins.eval"]


def test_repeated_names_come_from_the_memory() -> None:
    assert named_globals(pickle.dumps([Calls(os.system, "x"), Calls(os.system, "y"), os.getcwd])) == [
        "posix.system",
        "posix.getcwd",
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("posix.system", True),
        ("builtins.eval", True),
        ("__builtin__.eval", True),
        ("builtins.getattr", True),
        ("builtins.set", False),
        ("collections.defaultdict", False),
        ("datetime.datetime", False),
        ("argparse.Namespace", False),
        ("subprocess.Popen", True),
        ("functools.partial", True),
        ("torch.hub.load", True),
        ("torch.serialization._load", True),
        ("torch.optim.lr_scheduler.LambdaLR", False),
        ("my.Settings", False),
        ("numpy._core.multiarray.scalar", False),
    ],
)
def test_code_is_told_from_data(name: str, expected: bool) -> None:
    assert runs_code(name) is expected
