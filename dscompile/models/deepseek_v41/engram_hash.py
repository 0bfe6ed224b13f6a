"""Which table rows a token's n-grams hash to (model_v41 2.8), and the constants that the hash is made of.

The constants follow from the configuration alone: primes (table sizes) from `engram_vocab_size`, multipliers from the
layer number. The hash itself is integer arithmetic on tensors.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from dscompile.models.deepseek_v41.plan import Pages, plan_window, read_history, store_rows

BLOCKED = -1  # a token that no n-gram may reach across: before the sequence, an image token, padding


def _is_prime(n: int) -> bool:
    if n < 4:
        return n > 1
    if n % 2 == 0 or n % 3 == 0:
        return False
    return all(n % d and n % (d + 2) for d in range(5, int(n**0.5) + 1, 6))


@functools.cache
def engram_primes(layers: int, max_ngram: int, heads: int, vocab_size: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Table sizes [layer][n-gram - 2][head]: the ascending primes >= `vocab_size`, each used once."""
    found: list[int] = []
    n = vocab_size
    while len(found) < layers * (max_ngram - 1) * heads:
        if _is_prime(n):
            found.append(n)
        n += 1
    numbers = iter(found)
    return tuple(tuple(tuple(next(numbers) for _ in range(heads)) for _ in range(max_ngram - 1)) for _ in range(layers))


def engram_multipliers(layer: int, max_ngram: int, compressed_vocab_size: int) -> list[int]:
    """One odd int64 factor per lookback 0..max_ngram-1, from numpy's default generator seeded with 10007 * layer.

    Bounded so that a compressed id times its factor stays below 2^63.
    """
    try:
        import numpy
    except ImportError as error:
        raise ImportError("Engram layers take their hash multipliers from numpy: pip install numpy") from error
    bound = (2**63 - 1) // compressed_vocab_size // 2
    draws = numpy.random.default_rng(10007 * layer).integers(0, bound, max_ngram)
    return [int(draw) * 2 + 1 for draw in draws]


def with_history(tokens: Tensor, positions: Tensor, pool: Tensor, max_ngram: int, pages: Pages | None = None) -> Tensor:
    """Compressed ids [B, T] (`BLOCKED` for images) -> [B, max_ngram - 1 + T]: the ids before the chunk, then the chunk.

    `pool` int64 [B * (max_ngram - 1) + 1, 1] remembers the last ids of every sequence and is updated in place; `pages`
    says where in it, if not in the order of the batch.
    """
    width = max_ngram - 1
    plan = plan_window(positions, width, pages)
    before = positions[:, :1] + torch.arange(-width, 0, device=positions.device)
    chunk = tokens.unsqueeze(-1)
    history = torch.where(before >= 0, read_history(pool, plan.read, chunk).squeeze(-1), BLOCKED)
    store_rows(pool, plan.write, chunk)
    return torch.cat((history, tokens), 1)


def lookback(tokens: Tensor, max_ngram: int, pad: Tensor) -> Tensor:
    """Compressed ids [B, max_ngram - 1 + T] -> [B, T, max_ngram]: entry s is the token s places back.

    `tokens` begins with the max_ngram - 1 ids before the chunk; `BLOCKED` marks what must not be seen. From the first
    blocked token on, going back, every entry is `pad` (int64 scalar).
    """
    length = tokens.shape[1] - (max_ngram - 1)
    back = torch.stack([tokens[:, max_ngram - 1 - s : max_ngram - 1 - s + length] for s in range(max_ngram)], -1)
    reachable = (back != BLOCKED).long().cumprod(-1) == 1
    return torch.where(reachable, back, pad)


def engram_rows(back: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """back [B, T, n], multipliers [n], primes and offsets [n - 1, heads], all int64 -> rows [B, T, (n - 1) * heads].

    The running hash XORs in one more token times its multiplier per step; each n-gram's hash is taken modulo every
    head's table size.
    """
    scaled = back * multipliers
    running = scaled[..., 0]
    hashes = []
    for s in range(1, back.shape[-1]):
        running = running ^ scaled[..., s]
        hashes.append(running)
    grams = torch.stack(hashes, -1).unsqueeze(-1)
    return (torch.remainder(grams, primes) + offsets).flatten(-2)
