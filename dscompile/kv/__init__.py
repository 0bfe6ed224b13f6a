"""Caches in pages, and the hand-over of a request between processes. Start at `cache.py`; docs/kv.md."""
