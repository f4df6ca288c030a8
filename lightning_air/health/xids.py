"""What the driver's error numbers (XIDs) mean for a run: for those that training meets, and no others.

The classes are those of NVIDIA's "XID Errors" and of DCGM's health checks:
https://docs.nvidia.com/deploy/xid-errors/ and https://docs.nvidia.com/datacenter/dcgm/latest/user-guide/.
"""

CONTEXT_DEAD = (48, 79, 94, 95, 119, 120, 140)
"""After these the processes on the GPU cannot go on: no checkpoint can be taken from it."""

HARDWARE = (64, 74)
"""The hardware fails, and what runs on the GPU may still be saved."""

APPLICATION = (13, 31, 43, 45, 69)
"""As a rule the program is at fault, or what the driver did when it ended."""

_MEANINGS = {
    13: "A kernel has failed, usually through a bug in the program (such as an index out of bounds)",
    31: "A kernel has accessed memory that it may not, usually through a bug in the program",
    43: "A kernel has failed, and its program was stopped",
    45: "What ran on the GPU was cleaned up, since its program ended or another error came before",
    48: "A double-bit memory error, which cannot be corrected. The GPU needs a reset",
    64: "A row of memory could not be remapped. The GPU needs a reset and, if it comes back, to be replaced",
    69: "A kernel has used the graphics engine wrongly, usually through a bug in the program",
    74: "An NVLink error. The link, its cable or the GPU at one of its ends is broken",
    79: "The GPU has fallen off the bus. The machine needs a reboot",
    94: "A memory error that was contained: the program that used this memory ends, the GPU goes on",
    95: "A memory error that was not contained. The GPU needs a reset",
    119: "The GPU's own processor (GSP) does not answer. The GPU needs a reset",
    120: "The GPU's own processor (GSP) has failed. The GPU needs a reset",
    140: "Memory errors that were not recovered from. The GPU needs a reset",
}


def meaning(xid: int) -> str:
    """Return what an XID means, in a sentence without its full stop; where to look up one that is not here."""
    return _MEANINGS.get(xid, "NVIDIA's list of XIDs says what it means")
