"""DeepSeek-V4.1 in plain PyTorch, written for reading and for capture. Start at `model.py`."""

from dscompile.models.deepseek_v41.cache import CachePart, CacheReport, DeepseekV41Cache
from dscompile.models.deepseek_v41.checkpoint import CheckpointError
from dscompile.models.deepseek_v41.checks import check_positions
from dscompile.models.deepseek_v41.config import DeepseekV41Config
from dscompile.models.deepseek_v41.generate import generate
from dscompile.models.deepseek_v41.model import DeepseekV41ForCausalLM
from dscompile.models.deepseek_v41.paged import PagedDeepseekV41Cache

__all__ = [
    "CachePart",
    "CacheReport",
    "CheckpointError",
    "DeepseekV41Cache",
    "DeepseekV41Config",
    "DeepseekV41ForCausalLM",
    "PagedDeepseekV41Cache",
    "check_positions",
    "generate",
]
