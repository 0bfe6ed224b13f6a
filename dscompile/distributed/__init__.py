"""Experts spread over ranks: which rank holds which, and how that follows the load."""
