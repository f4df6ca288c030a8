"""A volume has one spelling on Databricks, and what the workspace cannot reach is refused with the right form."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_air.tracking.artifact_location import checked_artifact_location, same_location

law = settings(derandomize=True, deadline=None, database=None)


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        (None, None),
        ("/Volumes/c/s/v", "dbfs:/Volumes/c/s/v"),
        ("/Volumes/c/s/v/", "dbfs:/Volumes/c/s/v"),
        (" /Volumes/c/s/v//runs/a b/ ", "dbfs:/Volumes/c/s/v/runs/a b"),
        ("dbfs:/Volumes/c/s/v/runs", "dbfs:/Volumes/c/s/v/runs"),
        ("dbfs:///Volumes/c/s/v/runs", "dbfs:/Volumes/c/s/v/runs"),
        ("dbfs:/databricks/mlflow-tracking/1", "dbfs:/databricks/mlflow-tracking/1"),
        ("s3://bucket/runs/", "s3://bucket/runs"),
        ("abfss://c@a.dfs.core.windows.net/runs", "abfss://c@a.dfs.core.windows.net/runs"),
        ("gs://bucket", "gs://bucket"),
    ],
)
def test_databricks_form(location: str | None, expected: str | None) -> None:
    assert checked_artifact_location(location, on_databricks=True) == expected
    assert checked_artifact_location(expected, on_databricks=True) == expected


@pytest.mark.parametrize(
    "location",
    [
        "/Volumes",
        "/Volumes/c/s",
        "dbfs:/Volumes/c/s/",
        "/Volumes/c/s/v/../w",
        "/volumes/c/s/v",
        "dbfs:/volumes/c/s/v",
        "Volumes/c/s/v",
        "dbfs:Volumes/c/s/v",
        "/dbfs/Volumes/c/s/v",
        "/Workspace/Users/me/runs",
        "file:///tmp/runs",
        "/tmp/runs",
        "runs",
        "dbfs:",
        "dbfs:/",
    ],
)
def test_what_databricks_cannot_reach_is_refused(location: str) -> None:
    with pytest.raises(
        ValueError, match=r"artifact_location must be on .*'/Volumes/<catalog>.* got '.*Pass a volume's"
    ):
        checked_artifact_location(location, on_databricks=True)


def test_elsewhere_any_place_is_right_but_none_is_not() -> None:
    for location in ("/Volumes/MyDisk/runs", "runs", "file:///tmp/x"):
        assert checked_artifact_location(location, on_databricks=False) == location
    for on_databricks in (True, False):
        with pytest.raises(ValueError, match="artifact_location must not be empty, got ' '"):
            checked_artifact_location(" ", on_databricks=on_databricks)


pieces = st.sampled_from(
    ["/", "//", "Volumes", "dbfs", ":", "dbfs:/Volumes/c/s/v", "s3:", "file:", "a", " ", "..", "\n"]
)


@law
@given(st.text() | st.lists(pieces).map("".join))
def test_any_text_is_a_place_or_refused(location: str) -> None:
    try:
        checked = checked_artifact_location(location, on_databricks=True)
    except ValueError:
        return
    assert checked is not None
    assert checked_artifact_location(checked, on_databricks=True) == checked


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("dbfs:/Volumes/c/s/v", "/Volumes/c/s/v/", True),
        ("dbfs:/Volumes/c/s/v", "dbfs:///Volumes/c/s/v", True),
        ("file:///tmp/x", "/tmp/x", True),
        ("s3://bucket/x/", "s3://bucket/x", True),
        ("dbfs:/Volumes/c/s/v", "dbfs:/Volumes/c/s/w", False),
        ("s3://bucket/x", "gs://bucket/x", False),
    ],
)
def test_spellings_of_one_place(one: str, other: str, same: bool) -> None:
    assert same_location(one, other) == same_location(other, one) == same
