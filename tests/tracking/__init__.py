"""Tests of tracking."""
