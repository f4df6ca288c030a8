"""What a stager returns is a copy of its own, in memory that is used again, and whole once `wait` has returned."""

import threading
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from lightning_air.checkpoint.holdings import OwnPiece
from lightning_air.checkpoint.staging import Stager


def pieces_of(**tensors: Tensor) -> list[OwnPiece]:
    return [OwnPiece((key,), value, (0,) * value.ndim, tuple(value.shape)) for key, value in tensors.items()]


def state() -> dict[str, Tensor]:
    return {
        "odd": torch.arange(5, dtype=torch.uint8),  # what comes after it would be unaligned
        "complex": torch.arange(6.0).to(torch.complex128).view(2, 3),
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "float8": torch.arange(4.0).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(7, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3, dtype=torch.int16),
    }


def data(item: object) -> Tensor:
    assert isinstance(item.data, Tensor)
    return item.data


def test_a_copy_does_not_change_with_its_source() -> None:
    sources = {key: value.clone() for key, value in state().items()}
    copy = Stager().stage(pieces_of(**sources))
    for value in sources.values():
        value.zero_()
    assert [item.indices for item in copy.items] == [(MetadataIndex(key, (0,) * v.ndim),) for key, v in state().items()]
    for item, expected in zip(copy.items, state().values(), strict=True):
        assert data(item).dtype == expected.dtype
        assert data(item).shape == expected.shape
        assert data(item).tolist() == expected.tolist()
        assert data(item).is_contiguous()


def test_each_copy_has_a_storage_of_its_own_size() -> None:
    # `torch.save` writes a tensor's whole storage: with one for all, every tensor would be stored with all others.
    for item in Stager().stage(pieces_of(**state())).items:
        assert data(item).untyped_storage().nbytes() == data(item).nbytes


def test_the_memory_is_used_again_and_grows_when_it_has_to() -> None:
    stager = Stager()
    small = pieces_of(a=torch.ones(100), b=torch.ones(50))
    assert stager.missing_bytes(small) >= 600
    first = [data(item).data_ptr() for item in stager.stage(small).items]
    assert stager.missing_bytes(small) == 0
    assert [data(item).data_ptr() for item in stager.stage(small).items] == first
    assert [data(item).data_ptr() for item in stager.stage(small[:1]).items] == first[:1]
    large = pieces_of(a=torch.ones(10_000))
    assert 0 < stager.missing_bytes(large) < 40_064
    assert torch.equal(data(stager.stage(large).items[0]), torch.ones(10_000))
    stager.release()
    assert stager.missing_bytes(large) >= 40_000


def test_copies_do_not_overlap() -> None:
    items = Stager().stage(pieces_of(**state())).items
    ranges = sorted((data(i).data_ptr(), data(i).data_ptr() + data(i).nbytes) for i in items if data(i).numel())
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
    assert all(start % 16 == 0 for start, _ in ranges)


def test_what_may_wait_is_copied_in_the_background_and_the_rest_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_air.checkpoint import staging

    held = threading.Event()
    copy_all = staging._copy_all

    def hold_the_background(pairs: list[tuple[Tensor, Tensor]]) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert held.wait(30)
        copy_all(pairs)

    monkeypatch.setattr(staging, "_copy_all", hold_the_background)
    trained, buffer = torch.ones(4), torch.ones(4)
    copy = Stager().stage(pieces_of(trained=trained, buffer=buffer), lambda piece: piece.keys[0] == "trained")
    buffer.zero_()
    assert data(copy.items[1]).tolist() == [1.0] * 4
    trained.fill_(2.0)  # a caller that does not wait spoils its copy: it is really made later
    held.set()
    copy.wait()
    trained.zero_()
    assert data(copy.items[0]).tolist() == [2.0] * 4


def test_a_copy_that_fails_in_the_background_is_told_to_everyone_who_waits() -> None:
    piece = OwnPiece(("w",), torch.empty(3, device="meta"), (0,), (3,))
    copy = Stager().stage([piece], lambda _: True)
    for _ in range(2):  # the thread that steps the optimizer, and the one that writes
        with pytest.raises(RuntimeError, match="Copying the state into host memory failed") as caught:
            copy.wait()
        assert isinstance(caught.value.__cause__, NotImplementedError)


def test_a_copy_of_nothing() -> None:
    copy = Stager().stage([])
    copy.wait()
    assert copy.items == []
