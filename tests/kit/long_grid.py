"""Which members of the large parameter grids only `make soak` runs, so that `make test` stays short.

Each has a neighbour in its grid that goes through the same lines of ours: hsdp through those of fsdp; in the callback's
tests, stock DDP and AirStrategy's ddp through those of a single device and of fsdp. What differs has tests of its own.
"""

import re

_MEMBERS = (
    (r"tests/checkpoint/test_callback", r"\[.*(stock|air) ddp"),
    (r"tests/checkpoint/test_two_nodes", r"\[(ddp|hsdp)\]"),
    (r"tests/checkpoint/test_hostile", r"what_stays_fails_on_every_rank.*\[.*ddp"),
    (r"tests/checkpoint/test_lightning_form", r"hsdp"),
    (r"tests/strategy/test_features", r"\[hsdp"),
    (r"tests/strategy/test_features", r"compiled_models.*part"),
    (r"tests/strategy/test_checkpoints", r"on_another_world_size\[.*(hsdp|ddp)|every_rank\[hsdp"),
    (r"tests/strategy/test_training", r"\[.*hsdp.*(16|bf16)"),
    (r"tests/strategy/test_failing", r"first_error_in_their_message\[.*hsdp"),
)


def is_long(node_id: str) -> bool:
    """Return whether a test, by pytest's name for it, is one of them."""
    file, _, test = node_id.partition("::")
    return any(re.search(in_file, file) and re.search(of_test, test) for in_file, of_test in _MEMBERS)
