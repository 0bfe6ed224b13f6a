"""Spellings that several models share: norms, interleaved RoPE, the Sinkhorn chain, the spread of hyper-connections."""
