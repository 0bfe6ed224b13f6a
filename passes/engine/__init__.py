"""The rewrite engine: canonical graphs, patterns found by matching traced PyTorch, passes and pipelines.

``docs/patterns.md`` shows how to write a pattern and a pass.
"""

from . import graphs, optable
from .mutation import Writes
from .normalise import normalise, normalise_all
from .passes import Normalise, Pass, PassContext, PatternPass
from .pattern import Pattern, PatternError, Structural
from .pipeline import PassError, Pipeline
from .records import Match, MatchRecord, NearMiss, PassResult, Reject

__all__ = [
    "Match", "MatchRecord", "NearMiss", "Normalise", "Pass", "PassContext", "PassError", "PassResult", "Pattern",
    "PatternError", "PatternPass", "Pipeline", "Reject", "Structural", "Writes", "graphs", "normalise",
    "normalise_all", "optable",
]  # fmt: skip
