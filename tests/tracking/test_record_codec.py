"""What is packed comes back; what was damaged or never finished does not."""

import struct
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_air.tracking.points import Record
from lightning_air.tracking.record_codec import (
    LAST_FRAME,
    NO_FRAME,
    WORD_BYTES,
    DamagedError,
    Decoder,
    Layout,
    body_bytes_of,
    frame_word,
)

law = settings(max_examples=50, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
int64 = st.integers(-(2**63), 2**63 - 1)
names = st.lists(st.text(st.characters(codec=None)), unique=True, max_size=30)


def bodies(layout: Layout, timestamp_ms: int, step: int, values: Sequence[float]) -> tuple[bytes, bytes]:
    return layout.definition, layout.pack(timestamp_ms, step, *values)


def decode(decoder: Decoder, body: bytes) -> Record | None:
    return decoder.decode(frame_word(body), memoryview(body)[:-WORD_BYTES])


def bits(values: Sequence[float]) -> bytes:
    return struct.pack(f"{len(values)}d", *values)


@law
@given(names, int64, int64, st.data(), st.integers(0, 2**32 - 1))
def test_a_record_comes_back_to_the_last_bit(
    keys: list[str], timestamp_ms: int, step: int, data: st.DataObject, names_id: int
) -> None:
    values = data.draw(st.lists(st.floats(), min_size=len(keys), max_size=len(keys)))
    definition, body = bodies(Layout(keys, names_id), timestamp_ms, step, values)
    decoder = Decoder()
    assert decode(decoder, definition) is None
    record = decode(decoder, body)
    assert record is not None
    assert (record.timestamp_ms, record.step) == (timestamp_ms, step)
    assert list(record.values) == keys
    assert bits(list(record.values.values())) == bits(values)


@law
@given(names, st.data())
def test_every_frame_is_whole_words_and_ends_with_an_empty_one(keys: list[str], data: st.DataObject) -> None:
    for body in bodies(Layout(keys, 7), 1, 2, [0.5] * len(keys)):
        assert len(body) % WORD_BYTES == 0
        assert body[-WORD_BYTES:] == bytes(WORD_BYTES)
        word = frame_word(body)
        assert word not in (NO_FRAME, LAST_FRAME)
        assert body_bytes_of(word, len(body)) == len(body) - WORD_BYTES
        with pytest.raises(DamagedError):
            body_bytes_of(word, len(body) - WORD_BYTES)  # it would reach beyond the segment


@law
@given(st.lists(st.floats(), min_size=1, max_size=20), st.data())
def test_one_wrong_bit_is_seen(values: list[float], data: st.DataObject) -> None:
    keys = [f"m{index}" for index in range(len(values))]
    definition, body = bodies(Layout(keys, 1), 3, 4, values)
    decoder = Decoder()
    decode(decoder, definition)
    word = frame_word(body)
    damaged = bytearray(body)
    bit = data.draw(st.integers(0, 8 * (len(body) - WORD_BYTES) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DamagedError):
        decoder.decode(word, memoryview(damaged)[:-WORD_BYTES])
    with pytest.raises(DamagedError):
        decoder.decode(word ^ 1 << data.draw(st.integers(32, 63)), memoryview(body)[:-WORD_BYTES])


def test_a_record_whose_names_are_lost_is_damaged() -> None:
    with pytest.raises(DamagedError, match="names unknown"):
        decode(Decoder(), Layout(["a"], 1).pack(1, 2, 3.0))


def test_names_may_be_defined_again() -> None:
    decoder = Decoder()
    for keys in (["a", "b"], ["c"]):
        layout = Layout(keys, 1)
        decode(decoder, layout.definition)
        record = decode(decoder, layout.pack(1, 2, *range(len(keys))))
        assert record is not None
        assert list(record.values) == keys


@pytest.mark.parametrize("values", [(1.0,), (1.0, 2.0, 3.0), (1.0, "2"), (1.0, None)])
def test_what_does_not_fit_the_names_is_not_packed(values: tuple[object, ...]) -> None:
    with pytest.raises(struct.error):
        Layout(["a", "b"], 1).pack(1, 2, *values)
