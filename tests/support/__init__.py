"""Helpers for tests, imported as `support.<name>`."""
