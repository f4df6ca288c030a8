"""What a file of `torch.save` looks like from outside, before anything in it is loaded.

It is a zip archive in which nothing is compressed. `torch.load` takes much more: compressed archives, in which a small
file becomes a huge one, TorchScript, which is code, and the formats of before 2020, some of which unpack to disk.
"""

import io
import struct
import zipfile
from typing import BinaryIO

from lightning_air.checkpoint.pickle_names import named_globals, runs_code
from lightning_air.checkpoint.untrusted import BadCheckpointError, DamagedCheckpointError, UnsafeCheckpointError

_START = b"PK\x03\x04"
_LOCAL_HEADER_BYTES = 30
_IS_ENCRYPTED = 0x1
_MAX_SCANNED_BYTES = 1 << 20
_PROTOCOL = b"\x80\x02"
_OLD_FORMAT = "A safe load reads only archives, as torch.save has written them since 2020"


def check_archive(stream: BinaryIO) -> None:
    """Check that this is an archive which `torch.save` has written, and leave the stream at its start.

    Every part of it is as long as it will be in memory, so loading it takes no more memory than the file has bytes,
    but for what tensors share.

    Raises:
        DamagedCheckpointError: If it breaks off, or is no such archive. The message starts with a verb.
        UnsafeCheckpointError: If it is TorchScript, compressed, or read in two ways by two programs.
    """
    stream.seek(0)
    if (start := stream.read(len(_START))) != _START:
        raise _no_archive(start + stream.read(_MAX_SCANNED_BYTES))
    num_bytes = stream.seek(0, io.SEEK_END)
    try:
        with zipfile.ZipFile(stream) as archive:
            entries = archive.infolist()
        content = _pickle(stream, _checked(entries, num_bytes))
    except BadCheckpointError:
        raise
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError) as error:
        raise DamagedCheckpointError(
            f"is no whole archive of torch.save: {error}. It was cut off or altered"
        ) from error
    if not content.startswith(_PROTOCOL):
        raise _unsafe(f"holds a pickle that starts with {content[:2]!r}", content, "A safe load reads protocol 2 only")
    stream.seek(0)


def _checked(entries: list[zipfile.ZipInfo], num_bytes: int) -> zipfile.ZipInfo:
    names = [entry.filename for entry in entries]
    pickle_name = f"{names[0].split('/')[0]}/data.pkl" if names else ""
    if any(name.rpartition("/")[2] == "constants.pkl" for name in names):
        raise UnsafeCheckpointError("is a TorchScript archive, which is code and no checkpoint")
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & _IS_ENCRYPTED for entry in entries) or (
        sum(entry.file_size for entry in entries) > num_bytes
    ):
        raise UnsafeCheckpointError("is a compressed archive, as torch.save writes none: it may fill the memory")
    # zipfile also finds an archive behind other bytes, torch does not; torch takes no notice of upper and lower case.
    if names.count(pickle_name) != 1 or min(entry.header_offset for entry in entries) != 0:
        raise DamagedCheckpointError("is a zip archive, but none of torch.save")
    if len({name.lower() for name in names}) < len(names):
        raise UnsafeCheckpointError("is an archive in which a name is there twice")
    return entries[names.index(pickle_name)]


def _pickle(stream: BinaryIO, entry: zipfile.ZipInfo) -> bytes:
    # Not with zipfile: it checks a CRC that `torch.serialization.set_crc32_options(False)` leaves out.
    stream.seek(entry.header_offset)
    header = stream.read(_LOCAL_HEADER_BYTES)
    name_bytes, extra_bytes = struct.unpack_from("<HH", header, _LOCAL_HEADER_BYTES - 4)
    stream.seek(name_bytes + extra_bytes, io.SEEK_CUR)
    content = stream.read(entry.file_size)
    if len(content) < entry.file_size:
        raise DamagedCheckpointError("is no whole archive of torch.save: it was cut off")
    return content


def _no_archive(start: bytes) -> BadCheckpointError:
    if named_globals(start):
        return _unsafe("is a bare pickle", start, _OLD_FORMAT)
    return DamagedCheckpointError(f"is of another kind than torch.save writes, or its start was altered. {_OLD_FORMAT}")


def _unsafe(what: str, content: bytes, advice: str) -> UnsafeCheckpointError:
    names = named_globals(content)
    code = [name for name in names if runs_code(name)]
    if code:
        return UnsafeCheckpointError(
            f"{what} and names {', '.join(code)}, which is code and no data: to load it may run it. Do not use this "
            "file, and find out who wrote it"
        )
    naming = f" and names {', '.join(names)}" if names else ""
    return UnsafeCheckpointError(
        f"{what}{naming}. {advice}. If you trust whoever wrote it, load it with weights_only=False and save it again"
    )
