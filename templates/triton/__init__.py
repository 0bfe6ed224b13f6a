"""Triton templates: one file per operation, each exporting `TEMPLATES`; what kernels share is under `device/`.

A template is a function with the arguments of its op that allocates results and launches kernels, see `record.py`.
Kernels run on a GPU, are compiled ahead of time for one that is absent (`dscompile.tuning`), and run in Triton's
interpreter on a CPU (`TRITON_INTERPRET=1`), from the same source.
"""
