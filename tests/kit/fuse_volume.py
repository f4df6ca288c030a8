"""A volume that the kernel itself mounts: a FUSE file system with the rules, and the memory, of a real one.

It speaks the kernel's FUSE protocol and needs no library, but the right to mount. Files are kept in a directory
beside the mount; what a test writes there, another node has written. Whole files only: written from front to back
and there once they are closed; no append, rename, link or seek. The kernel remembers failed look-ups.
"""

# The kernel speaks of names and descriptors, not of paths.
# ruff: noqa: PTH102, PTH106, PTH108, PTH110, PTH112, PTH116, PTH123, PTH208

import contextlib
import ctypes
import errno
import json
import os
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_HEADER, _REPLY = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
_ATTRIBUTES = struct.Struct("<6Q10I")
# What symlink, mknod, rename, link and rename2 are answered with.
_REFUSALS = {6: errno.ENOTSUP, 8: errno.ENOTSUP, 12: errno.EXDEV, 13: errno.ENOTSUP, 45: errno.EXDEV}
_ROOT, _BLOCK_BYTES, _UNMOUNT_LAZILY = 1, 128 << 10, 2


@dataclass(frozen=True, kw_only=True)
class FuseBehaviour:
    """What the volume does.

    Attributes:
        negative_seconds: How long the kernel remembers that a name was not there.
        num_short: How many files, from the first on, keep half of what was written, while their closing succeeds.
        num_failing: How many files, from the first on, fail with EIO when they are closed, and keep nothing.
    """

    negative_seconds: float = 0.0
    num_short: int = 0
    num_failing: int = 0


@dataclass(frozen=True)
class FuseVolume:
    """A mounted volume, and the directory where its files are kept."""

    mount: Path
    kept: Path


@contextlib.contextmanager
def fuse_volume(directory: Path, behaviour: FuseBehaviour | None = None) -> Iterator[FuseVolume | None]:
    """Mount a volume below a directory until the block ends; yields None where one may not mount."""
    mount, kept = directory / "mounted", directory / "kept"
    mount.mkdir()
    kept.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError:
        yield None
        return
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    is_mounted = libc.mount(b"volume", os.fsencode(mount), b"fuse.volume", 0, options.encode()) == 0
    if not is_mounted:
        os.close(device)
        yield None
        return
    try:
        arguments = [str(device), str(kept), json.dumps(asdict(behaviour or FuseBehaviour()))]
        server = subprocess.Popen([sys.executable, "-I", __file__, *arguments], pass_fds=[device])
    finally:
        os.close(device)
    try:
        yield FuseVolume(mount, kept)
    finally:
        libc.umount2(os.fsencode(mount), _UNMOUNT_LAZILY)
        server.wait(10)


# ---- the server, in a process of its own -----------------------------------------------------------------------------


class _Refused(Exception):  # noqa: N818 - an answer rather than an error
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Server:
    def __init__(self, device: int, kept: str, behaviour: dict[str, Any]) -> None:
        self.device = device
        self.kept = kept
        self.negative_seconds = behaviour["negative_seconds"]
        self.num_short, self.num_failing = behaviour["num_short"], behaviour["num_failing"]
        self.paths = {_ROOT: ""}
        self.nodes = {"": _ROOT}
        self.written: dict[int, bytearray] = {}
        """What was written to each open file, by its node."""
        self.calls: dict[int, Callable[[int, bytes], bytes]] = {
            1: self.look_up,
            3: self.get_attributes,
            4: self.set_attributes,
            9: self.make_folder,
            10: self.unlink,
            11: self.remove_folder,
            14: self.open,
            15: self.read,
            16: self.write,
            17: lambda *_: struct.pack("<5Q4I24x", 1 << 30, 1 << 30, 1 << 30, 1 << 20, 1 << 20, 4096, 255, 4096, 0),
            18: self.release,
            25: self.close,
            26: lambda _, body: struct.pack("<4I2H2I36x", 7, 31, 0, 1 << 5, 16, 12, _BLOCK_BYTES, 1),
            27: lambda *_: bytes(16),
            28: self.list,
            29: lambda *_: b"",
            35: self.create,
        }

    def serve(self) -> None:
        while True:
            try:
                message = os.read(self.device, _BLOCK_BYTES + 4096)
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                if error.errno in {errno.EINTR, errno.ENOENT}:
                    continue
                raise
            _, call, unique, node, *_ = _HEADER.unpack_from(message)
            if call in {2, 36, 42}:  # forget and interrupt: nobody waits for an answer
                continue
            try:
                answer, number = self.calls.get(call, self.refuse)(node, message[_HEADER.size :]), 0
            except _Refused as refusal:
                answer, number = b"", _REFUSALS.get(call, refusal.number)
            except OSError as error:
                answer, number = b"", error.errno or errno.EIO
            with contextlib.suppress(FileNotFoundError):  # whoever asked has been killed
                os.write(self.device, _REPLY.pack(_REPLY.size + len(answer), -number, unique) + answer)

    def refuse(self, node: int, body: bytes) -> bytes:
        raise _Refused(errno.ENOSYS)

    def child(self, node: int, name: bytes) -> str:
        return f"{self.paths[node]}/{os.fsdecode(name.split(bytes(1))[0])}"

    def node_of(self, path: str) -> int:
        if path not in self.nodes:
            self.nodes[path] = len(self.paths) + 1
            self.paths[self.nodes[path]] = path
        return self.nodes[path]

    def attributes(self, node: int) -> bytes:
        path = self.kept + self.paths[node]
        if node in self.written:
            size, mode, modified = len(self.written[node]), stat.S_IFREG | 0o644, 0
        else:
            status = os.stat(path)
            size, mode, modified = status.st_size, status.st_mode, int(status.st_mtime)
        times = (modified, modified, modified, 0, 0, 0)
        return _ATTRIBUTES.pack(node, size, size // 512 + 1, *times, mode, 1, os.getuid(), os.getgid(), 0, 4096, 0)

    def entry(self, node: int) -> bytes:
        return struct.pack("<4Q2I", node, 0, 0, 0, 0, 0) + self.attributes(node)

    def look_up(self, node: int, body: bytes) -> bytes:
        path = self.child(node, body)
        if not os.path.exists(self.kept + path) and self.node_of(path) not in self.written:
            seconds, rest = divmod(self.negative_seconds, 1)
            return struct.pack("<4Q2I", 0, 0, int(seconds), 0, int(rest * 1e9), 0) + bytes(_ATTRIBUTES.size)
        return self.entry(self.node_of(path))

    def get_attributes(self, node: int, body: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self.attributes(node)

    def set_attributes(self, node: int, body: bytes) -> bytes:
        what, _, _, size = struct.unpack_from("<IIQQ", body)
        if what & 8:  # the length
            if size or node not in self.written:
                raise _Refused(errno.ENOTSUP)
            self.written[node].clear()
        return self.get_attributes(node, body)

    def make_folder(self, node: int, body: bytes) -> bytes:
        path = self.child(node, body[8:])
        os.mkdir(self.kept + path)
        return self.entry(self.node_of(path))

    def unlink(self, node: int, body: bytes) -> bytes:
        os.unlink(self.kept + self.child(node, body))
        return b""

    def remove_folder(self, node: int, body: bytes) -> bytes:
        os.rmdir(self.kept + self.child(node, body))
        return b""

    def create(self, node: int, body: bytes) -> bytes:
        child = self.node_of(self.child(node, body[16:]))
        opened = self.open(child, body)
        return self.entry(child) + opened

    def open(self, node: int, body: bytes) -> bytes:
        (flags,) = struct.unpack_from("<I", body)
        if flags & os.O_APPEND or flags & os.O_ACCMODE == os.O_RDWR:
            raise _Refused(errno.ENOTSUP)
        if flags & os.O_ACCMODE == os.O_WRONLY:
            self.written[node] = bytearray()
        return struct.pack("<QIi", flags & os.O_ACCMODE, 0, 0)

    def read(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        with open(self.kept + self.paths[node], "rb") as file:
            file.seek(offset)
            return file.read(size)

    def write(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        if offset != len(self.written[node]):
            raise _Refused(errno.ENOTSUP)
        self.written[node] += body[40 : 40 + size]
        return struct.pack("<II", size, 0)

    def close(self, node: int, body: bytes) -> bytes:
        if struct.unpack_from("<Q", body)[0] == os.O_RDONLY or node not in self.written:
            return b""
        data = self.written[node]
        if self.num_failing > 0:
            self.num_failing -= 1
            raise _Refused(errno.EIO)
        if self.num_short > 0:
            self.num_short -= 1
            del data[len(data) // 2 :]
        with open(self.kept + self.paths[node], "wb") as file:
            file.write(data)
        return b""

    def release(self, node: int, body: bytes) -> bytes:
        if struct.unpack_from("<Q", body)[0] != os.O_RDONLY:
            self.written.pop(node, None)
        return b""

    def list(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        found = b""
        for index, name in enumerate(sorted(os.listdir(self.kept + self.paths[node]))[offset:], start=offset + 1):
            encoded = os.fsencode(name)
            is_folder = os.path.isdir(f"{self.kept}{self.paths[node]}/{name}")
            item = struct.pack("<QQII", index, index, len(encoded), 4 if is_folder else 8) + encoded
            item += bytes(-len(item) % 8)
            if len(found) + len(item) > size:
                break
            found += item
        return found


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # should whoever started this be killed
    _Server(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])).serve()
