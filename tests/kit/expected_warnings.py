"""Warnings that torch and Lightning give in a healthy small run; all others fail a test, and a rank."""

EXPECTED_WARNINGS = {
    r"`isinstance\(treespec, LeafSpec\)` is deprecated": "Lightning 2.6's combined data loader with torch 2.13",
    r"The '\w+' does not have many workers": "tests load tiny data; given on machines with more cores only",
    r"This DataLoader will create \d+ worker processes in total": "given on machines with fewer cores only",
    r"The number of training batches \(\d+\) is smaller than the logging interval": "tests train for a few batches",
    r"GPU available but not used": "tests train on the CPU, also on machines with a GPU",
    r"This process \(pid=\d+\) is multi-threaded, use of fork\(\)": "Python 3.12, when a data loader forks its workers",
}
"""From the start of the message, as a regular expression, to where it comes from."""
