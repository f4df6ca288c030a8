"""Fit a text into what the server stores: its length, and characters that every database takes."""

import hashlib

MAX_PARAM_LENGTH = 6_000
"""Characters of a parameter's value."""

MAX_TAG_LENGTH = 5_000
"""Characters of a tag's value; Databricks takes 8,000, older open source servers this many."""


def storable(text: str, max_length: int) -> str:
    """Return the text, whole if it fits, else its start with a mark that tells its length and a hash of all of it.

    The same text gives the same result, and two long texts that differ anywhere give different ones. What databases
    refuse (NUL, and halves of surrogate pairs as undecodable file names have them) is escaped.

    Args:
        text: Any.
        max_length: Characters, at least 100.
    """
    escaped = text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")
    if len(escaped) <= max_length:
        return escaped
    digest = hashlib.sha256(escaped.encode()).hexdigest()[:16]
    mark = f"… [cut: {len(escaped)} characters, sha256 {digest}…]"
    return escaped[: max_length - len(mark)] + mark
