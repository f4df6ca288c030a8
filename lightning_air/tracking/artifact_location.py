"""Where an experiment keeps its artifacts, in the form that Databricks wants: `dbfs:/Volumes/…` for a volume."""

import re

_VOLUME_FORM = "'/Volumes/<catalog>/<schema>/<volume>/…'"
_NUM_VOLUME_PARTS = 4  # Volumes, catalog, schema, volume


def checked_artifact_location(location: str | None, *, on_databricks: bool) -> str | None:
    """Return an artifact location as the server wants it.

    Args:
        location: What the user passed.
        on_databricks: The tracking server is a Databricks workspace. Elsewhere `/Volumes` may be any folder (on macOS
            it holds the disks), so that the location is taken as it is.

    Raises:
        ValueError: The location is empty, or Databricks could not reach it.
    """
    if location is None:
        return None
    stripped = location.strip()
    if not stripped:
        raise ValueError(f"artifact_location must not be empty, got {location!r}. Leave it out for the default.")
    if not on_databricks:
        return stripped
    scheme, path = re.fullmatch(r"(?:([a-zA-Z][\w+.-]*):)?(.*)", stripped, re.DOTALL).groups()  # type: ignore[union-attr] # it matches all
    parts = [part.strip() for part in path.split("/") if part.strip()]
    is_absolute = path.startswith("/")
    if parts and parts[0].lower() == "dbfs" and scheme is None:
        raise _refusal(location, "/dbfs is a mount that serverless compute does not have")
    if scheme not in {None, "dbfs"}:
        if scheme == "file":
            raise _refusal(location, "the machine's disk ends with it")
        return re.sub(r"[\s/]+$", "", stripped)  # s3://, abfss://, gs://
    if is_absolute and parts and parts[0] == "Volumes":
        if len(parts) < _NUM_VOLUME_PARTS or {".", ".."} & set(parts):
            raise _refusal(location, "it names no catalog, schema and volume, or climbs out of them")
        return "dbfs:/" + "/".join(parts)
    if scheme == "dbfs" and is_absolute and parts and parts[0].lower() != "volumes":
        return "dbfs:/" + "/".join(parts)
    raise _refusal(location, "it is no place that the workspace can reach")


def same_location(one: str, other: str) -> bool:
    """Return whether two artifact locations are spellings of one place."""
    return _plain(one) == _plain(other)


def _plain(location: str) -> str:
    path = re.sub(r"^(file|dbfs):(//)?(?=/)", "", location)
    return re.sub(r"(?<!:)/+", "/", path).rstrip("/")


def _refusal(location: str, reason: str) -> ValueError:
    return ValueError(
        f"artifact_location must be on a Unity Catalog volume, {_VOLUME_FORM}, or in a cloud store (s3://, abfss://, "
        f"gs://), got {location!r}: {reason}. Pass a volume's path."
    )
