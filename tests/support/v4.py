"""The miniature transformers V4 under the short names that tests use."""

from dscompile.miniatures import token_ids
from dscompile.miniatures import v4_config as tiny_config
from dscompile.miniatures import v4_model as tiny

__all__ = ["tiny", "tiny_config", "token_ids"]
