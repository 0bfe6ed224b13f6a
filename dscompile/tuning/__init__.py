"""Compiling kernels for GPUs that are not here, reading what came out, choosing among configs, keeping the choice."""
