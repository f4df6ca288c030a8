"""Asynchronous, verified, atomic checkpoints on volumes, URLs and local folders (to come)."""
