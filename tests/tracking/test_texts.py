"""A text is stored whole where it fits, and else cut so that it shows."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_air.tracking.texts import storable

law = settings(derandomize=True, deadline=None, database=None)


@law
@given(st.text(max_size=300), st.integers(100, 200))
def test_fits_and_is_stable(text: str, limit: int) -> None:
    stored = storable(text, limit)
    assert len(stored) <= limit
    assert storable(stored, limit) == stored
    assert "\0" not in stored
    stored.encode("utf-8")


@law
@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=100))
def test_short_is_whole(text: str) -> None:
    assert storable(text, 100) == text


@law
@given(st.text(min_size=200), st.text(min_size=200))
def test_long_ones_that_differ_stay_different(one: str, other: str) -> None:
    assert (storable(one, 100) == storable(other, 100)) == (one == other)


def test_cut_shows_length_and_hash() -> None:
    stored = storable("x" * 7000, 6000)
    assert len(stored) == 6000
    assert stored.startswith("x" * 5900)
    assert "… [cut: 7000 characters, sha256 " in stored
    assert storable("x" * 6999 + "y", 6000) != stored


def test_what_databases_refuse_is_escaped() -> None:
    assert storable("a\0b\udcff", 100) == "a\\x00b\\udcff"
