"""Number formats and KV byte layouts as data. See `KVFormat` and `FORMATS`."""

from dscompile.formats.byte_report import ByteReport
from dscompile.formats.pages import PageLayout
from dscompile.formats.record import KVFormat
from dscompile.formats.registry import FORMATS
from dscompile.formats.tables import unpack_by_table

__all__ = ["FORMATS", "ByteReport", "KVFormat", "PageLayout", "unpack_by_table"]
