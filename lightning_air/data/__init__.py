"""Resuming at the exact sample (to come)."""
