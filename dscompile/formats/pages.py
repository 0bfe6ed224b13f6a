"""How rows sit in a page: one after the other, or all payloads first and then all scales."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class PageLayout:
    """Arrangement of the rows of one page.

    Attributes:
        order: "rows" = each row is payload then scales, rows follow each other. "segregated" = the payloads of all
            rows of the page, then the scales of all rows, then zero bytes up to the page's stride.
        rows: rows per page; 0 = not fixed by the layout, the caller says how many.
        align_bytes: the stride of a page is a multiple of this.
    """

    order: Literal["rows", "segregated"] = "rows"
    rows: int = 0
    align_bytes: int = 1

    def __post_init__(self) -> None:
        if self.order not in ("rows", "segregated"):
            raise ValueError(f"page order {self.order!r}, allowed: ['rows', 'segregated']")
        if self.rows < 0:
            raise ValueError(f"rows per page {self.rows}, allowed: >= 0")
        if self.align_bytes < 1:
            raise ValueError(f"page alignment {self.align_bytes} bytes, allowed: >= 1")

    def rows_in_page(self, rows: int | None) -> int:
        """The rows of a page: `rows` if given, else the layout's own."""
        count = self.rows if rows is None else rows
        if count < 1:
            raise ValueError(f"rows per page {rows}, allowed: >= 1 (this layout does not fix it)")
        return count

    def stride_bytes(self, row_bytes: int, rows: int) -> int:
        """Bytes from one page to the next."""
        return -(-row_bytes * rows // self.align_bytes) * self.align_bytes

    def parts(self, pages: Tensor, payload_bytes: int, scale_bytes: int, rows: int) -> tuple[Tensor, Tensor]:
        """uint8 [..., stride] -> (payload [..., rows, payload_bytes], scales [..., rows, scale_bytes]), both views."""
        row_bytes = payload_bytes + scale_bytes
        stride = self.stride_bytes(row_bytes, rows)
        if pages.dtype != torch.uint8:
            raise TypeError(f"pages have dtype {pages.dtype}, allowed: torch.uint8")
        if pages.dim() == 0 or pages.shape[-1] != stride:
            raise ValueError(f"pages have shape {tuple(pages.shape)}, allowed: [..., {stride}] for {rows} rows")
        used = pages[..., : rows * row_bytes]
        if self.order == "rows":
            table = used.unflatten(-1, (rows, row_bytes))
            return table[..., :payload_bytes], table[..., payload_bytes:]
        payload = used[..., : rows * payload_bytes].unflatten(-1, (rows, payload_bytes))
        return payload, used[..., rows * payload_bytes :].unflatten(-1, (rows, scale_bytes))

    def to_rows(self, pages: Tensor, payload_bytes: int, scale_bytes: int, rows: int) -> Tensor:
        """uint8 [..., stride] -> uint8 [..., rows, row_bytes]; a view for order "rows", else a copy."""
        payload, scales = self.parts(pages, payload_bytes, scale_bytes, rows)
        if self.order == "rows":
            row_bytes = payload_bytes + scale_bytes
            return pages[..., : rows * row_bytes].unflatten(-1, (rows, row_bytes))
        return torch.cat((payload, scales), -1)

    def from_rows(self, table: Tensor, payload_bytes: int) -> Tensor:
        """uint8 [..., rows, row_bytes] -> uint8 [..., stride]; a view for order "rows" without padding."""
        rows, row_bytes = table.shape[-2:]
        padding = self.stride_bytes(row_bytes, rows) - rows * row_bytes
        if self.order == "rows":
            parts = [table.flatten(-2)]
        else:
            parts = [table[..., :payload_bytes].flatten(-2), table[..., payload_bytes:].flatten(-2)]
        if padding:
            parts.append(table.new_zeros((*table.shape[:-2], padding)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
