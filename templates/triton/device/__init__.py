"""Functions that kernels call: number formats, norms, rotation, online softmax."""
