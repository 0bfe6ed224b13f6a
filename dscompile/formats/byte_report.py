"""What a layout costs in bytes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ByteReport:
    """Bytes of a row and of a page. `page_rows` and `page_bytes` are 0 where the layout has no pages of fixed size.

    Attributes:
        name: the format.
        dim: values in a row.
        payload_bytes: values of a row, a bf16 tail included.
        scale_bytes: scales of a row, without `pad_bytes`.
        pad_bytes: zero bytes of a row.
        page_rows: rows in a page.
        page_bytes: stride of a page.
    """

    name: str
    dim: int
    payload_bytes: int
    scale_bytes: int
    pad_bytes: int
    page_rows: int = 0
    page_bytes: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.payload_bytes + self.scale_bytes + self.pad_bytes

    @property
    def page_pad_bytes(self) -> int:
        """Bytes of a page that no row uses."""
        return self.page_bytes - self.page_rows * self.row_bytes

    @property
    def bits_per_value(self) -> float:
        """Stored bits per value, page padding included."""
        if self.page_rows:
            return 8 * self.page_bytes / (self.page_rows * self.dim)
        return 8 * self.row_bytes / self.dim

    def __str__(self) -> str:
        row = f"{self.name}: {self.dim} values -> {self.payload_bytes} + {self.scale_bytes} scales"
        row += f" + {self.pad_bytes} pad" if self.pad_bytes else ""
        row += f" = {self.row_bytes} bytes, {self.bits_per_value:.3g} bits a value"
        if not self.page_rows:
            return row
        return f"{row}; page of {self.page_rows} rows {self.page_bytes} bytes ({self.page_pad_bytes} unused)"
