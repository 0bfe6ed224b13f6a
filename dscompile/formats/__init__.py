"""Number formats and KV byte layouts as data. See `KVFormat` and `FORMATS`."""

from dscompile.formats.pages import PageLayout
from dscompile.formats.record import KVFormat
from dscompile.formats.registry import FORMATS

__all__ = ["FORMATS", "KVFormat", "PageLayout"]
