"""Copy a rank's share into host memory: the only part of a save that training waits for.

The memory is allocated once and used again for each save: a fresh page costs ten times what copying into it costs. On
CUDA it is pinned, and the copies run on a stream of their own.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_air.checkpoint.holdings import OwnPiece
from lightning_air.checkpoint.shard_file import Item

_ALIGNMENT = 64  # bytes; of a cache line, and more than any dtype needs


class StagedCopy:
    """The copies of one save.

    Attributes:
        items: What to write; complete once `wait` has returned.
    """

    def __init__(self, items: list[Item], finish: Callable[[], None]) -> None:
        self.items = items
        self._finish = finish
        self._lock = threading.Lock()
        self._is_complete = False

    def wait(self) -> None:
        """Return once all is copied. Any thread may call this, any number of times.

        Raises:
            RuntimeError: If a copy failed.
        """
        with self._lock:
            if not self._is_complete:
                self._finish()
                self._is_complete = True


class Stager:
    """Host memory for one save at a time; a second `stage` before the first is written would overwrite it."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._streams: dict[torch.device, Any] = {}

    def missing_bytes(self, pieces: Sequence[OwnPiece]) -> int:
        """Return how much more host memory copying these pieces would take."""
        held = 0 if self._memory is None else self._memory.nbytes
        total = _layout(pieces)[-1]
        if total <= held:
            return 0
        if not any(piece.source.is_cuda for piece in pieces):
            return total - held
        # Of pinned memory torch takes the next power of two, and gives none back to the system.
        return 1 << (total - 1).bit_length()

    def stage(self, pieces: Sequence[OwnPiece], may_wait: Callable[[OwnPiece], bool] | None = None) -> StagedCopy:
        """Copy the pieces.

        Args:
            pieces: What to copy.
            may_wait: Which pieces do not change until `StagedCopy.wait` is called: their copying may still go on when
                this returns. None: all is copied on return.
        """
        *starts, total = _layout(pieces)
        on_cuda = any(piece.source.is_cuda for piece in pieces)
        if self._memory is None or self._memory.nbytes < total:
            self._memory = None  # free it first
            self._memory = torch.empty(total, dtype=torch.uint8, pin_memory=on_cuda)
        # A storage of its own for each: torch.save writes a tensor's whole storage.
        memory = memoryview(self._memory.numpy())  # type: ignore[arg-type] # numpy types its buffer from 3.12 on
        targets = [_tensor_over(memory, start, piece.source) for start, piece in zip(starts, pieces, strict=True)]
        items = [Item(piece.indices, target) for piece, target in zip(pieces, targets, strict=True)]
        pairs = [(target, piece.source) for target, piece in zip(targets, pieces, strict=True)]
        can_wait = [may_wait is not None and may_wait(piece) for piece in pieces]
        now = [pair for pair, later in zip(pairs, can_wait, strict=True) if not later]
        later = [pair for pair, wait in zip(pairs, can_wait, strict=True) if wait]
        finish_now = self._copy(now, on_cuda=on_cuda, in_background=False)
        finish_later = self._copy(later, on_cuda=on_cuda, in_background=True)
        finish_now()
        copy = StagedCopy(items, finish_later)
        if not later:
            copy.wait()
        return copy

    def _copy(self, pairs: list[tuple[Tensor, Tensor]], *, on_cuda: bool, in_background: bool) -> Callable[[], None]:
        """Start the copies and return what waits for them."""
        if not pairs:
            return _nothing
        if on_cuda:
            return self._copy_from_cuda(pairs)
        if not in_background:
            _copy_all(pairs)
            return _nothing
        failures: list[BaseException] = []

        def run() -> None:
            try:
                _copy_all(pairs)
            except BaseException as error:  # noqa: BLE001 - raised in `finish`, on the thread that needs the copy
                failures.append(error)

        thread = threading.Thread(target=run, name="lightning-air-stage", daemon=True)
        thread.start()

        def finish() -> None:
            thread.join()
            if failures:
                raise RuntimeError(f"Copying the state into host memory failed: {failures[0]!r}") from failures[0]

        return finish

    def _copy_from_cuda(self, pairs: list[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        events = []
        for device in {source.device for _, source in pairs if source.is_cuda}:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream = self._streams[device]
            stream.wait_stream(torch.cuda.current_stream(device))  # what the optimizer has queued comes first
            with torch.cuda.stream(stream):
                for target, source in pairs:
                    if source.device == device:
                        target.copy_(source, non_blocking=True)
                        # The allocator must not hand the source's memory out while this stream still reads it.
                        source.record_stream(stream)
                events.append(stream.record_event())
        _copy_all([(target, source) for target, source in pairs if not source.is_cuda])

        def finish() -> None:
            for event in events:
                event.synchronize()

        return finish

    def release(self) -> None:
        """Give the memory back."""
        self._memory = None
        self._streams.clear()


def wait_for_devices(pieces: Sequence[OwnPiece]) -> None:
    """Wait for what this thread has queued on the devices of these pieces: another thread is going to read them."""
    for device in {piece.source.device for piece in pieces if piece.source.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _layout(pieces: Sequence[OwnPiece]) -> list[int]:
    """Return where each piece starts, and where the last one ends."""
    starts, end = [], 0
    for piece in pieces:
        starts.append(end)
        end += -(-piece.source.nbytes // _ALIGNMENT) * _ALIGNMENT
    return [*starts, end]


def _tensor_over(memory: memoryview, start: int, like: Tensor) -> Tensor:
    if like.numel() == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=like.nbytes, offset=start)
    return flat.view(like.dtype).view(like.shape)


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source)


def _nothing() -> None:
    pass
