"""Sinkhorn normalisation of small matrices in registers."""

import triton
import triton.language as tl


@triton.jit
def normalised(matrix, inside, axis: tl.constexpr, eps):
    """fp32 [T, P, P] divided by its sums along an axis + eps; 0 where not inside."""
    # Outside, all is 0, and so may be the sum.
    total = tl.where(inside, tl.sum(matrix, axis, keep_dims=True) + eps, 1.0)
    return tl.where(inside, matrix / total, 0.0)


@triton.jit
def sinkhorn_matrices(logits, iters, eps, SIZE: tl.constexpr, P: tl.constexpr):
    """logits fp32 [T, P, P], of which [T, SIZE, SIZE] count -> fp32 [T, P, P] with zeros around: softmax along the last
    axis plus eps, columns, then iters - 1 times rows and columns."""
    if P != SIZE:
        row, column = tl.arange(0, P)[None, :, None], tl.arange(0, P)[None, None, :]
        inside = (row < SIZE) & (column < SIZE)
        logits = tl.where(inside, logits, -3.0e38)
        matrix = tl.exp(logits - tl.max(logits, 2, keep_dims=True))
        matrix = tl.where(inside, matrix / tl.sum(matrix, 2, keep_dims=True) + eps, 0.0)
        matrix = normalised(matrix, inside, 1, eps)
        for _ in range(1, iters):
            matrix = normalised(normalised(matrix, inside, 2, eps), inside, 1, eps)
    else:
        matrix = tl.exp(logits - tl.max(logits, 2, keep_dims=True))
        matrix = matrix / tl.sum(matrix, 2, keep_dims=True) + eps
        matrix = matrix / (tl.sum(matrix, 1, keep_dims=True) + eps)
        for _ in range(1, iters):
            matrix = matrix / (tl.sum(matrix, 2, keep_dims=True) + eps)
            matrix = matrix / (tl.sum(matrix, 1, keep_dims=True) + eps)
    return matrix
