"""The operation that docs/ops.md adds as an example works as written there."""

import re
from pathlib import Path

import pytest
import torch

from dscompile.ops import OPS


def test_the_example_of_the_page_works(repo_root: Path) -> None:
    text = (repo_root / "docs" / "ops.md").read_text()
    (source,) = re.findall(r"```python\n(_CHECK = .*?)```", text, re.DOTALL)
    names: dict[str, object] = {}
    exec(  # the page leaves out its imports
        "from typing import Any\nfrom torch import Tensor\nfrom dscompile.ops.checks import FLOATS, Check\n"
        "from dscompile.ops.cost import Cost, costed\nfrom dscompile.ops.registry import define\n" + source,
        names,
    )
    spec = OPS.pop("scale_rows")
    args = torch.randn(3, 4), torch.tensor([1.0, 2.0, 0.0])
    assert torch.equal(spec.op(*args), args[0] * args[1][:, None])
    torch.library.opcheck(spec.op, args)
    assert spec.cost_of(*args).numbers() == {"read_bytes": 60.0, "write_bytes": 48.0, "flops": 12.0, "link_bytes": 0.0}
    with pytest.raises(ValueError, match=r"dsv4::scale_rows: shape of factor is \[2\]; allowed: \[3\]"):
        spec.op(args[0], args[1][:2])


def test_the_page_lists_the_vocabulary(repo_root: Path) -> None:
    table = re.findall(r"^\| [a-z, ]+ \| (`.*) \|$", (repo_root / "docs" / "ops.md").read_text(), re.MULTILINE)
    listed = {name for row in table for name in re.findall(r"`(\w+)`", row)}
    assert listed == set(OPS)
