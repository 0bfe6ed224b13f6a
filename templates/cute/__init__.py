"""Kernels in CuTe DSL (nvidia-cutlass-dsl), where explicit control over memory and tensor cores pays.

Compiled only: no GPU has run any of them.
"""
