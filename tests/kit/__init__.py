"""The test kit: real ranks, named points, nodes with their own network, and guards against leaks.

Import from the modules (`tests.kit.ranks`, `tests.kit.points`, `tests.kit.nodes`, ...); this package imports nothing,
so that `tests/conftest.py` stays cheap for tests that start no rank.
"""
