"""Reads a report's data as its page does, written a second time: what is compared with what was put in."""

import base64
import json
import re
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Decoded:
    """The data of a report.

    Attributes:
        head: Its JSON.
        values: By the key of the map, shape (GPUs, columns); NaN where there is a gap.
    """

    head: dict[str, Any]
    values: dict[str, npt.NDArray[np.float64]]

    def step(self, key: str) -> float:
        return next(each["step"] for each in self.head["maps"] if each["key"] == key)


def decode_report(page: str) -> Decoded:
    (text,) = re.findall(r'<script type="text/plain" id="data">([^<]*)</script>', page)
    return decode(text)


def decode(text: str) -> Decoded:
    content = zlib.decompress(base64.b64decode(text, validate=True), -15)
    length = int.from_bytes(content[:4], "little")
    head = json.loads(content[4 : 4 + length])
    rest = np.frombuffer(content[4 + length :], dtype=np.uint8)
    shape = (len(head["gpus"]), head["columns"])
    cells = shape[0] * shape[1]
    assert len(rest) == 2 * cells * len(head["maps"])
    values = {}
    for number, described in enumerate(head["maps"]):
        low, high = rest[2 * cells * number :][: 2 * cells].astype(np.int64).reshape(2, *shape)
        folded = low + 256 * high
        changes = np.where(folded % 2 == 0, folded // 2, -(folded + 1) // 2)
        whole = np.cumsum(changes, axis=1) % 65_536
        values[described["key"]] = np.where(whole == 0, np.nan, described["offset"] + (whole - 1) * described["step"])
    return Decoded(head, values)
