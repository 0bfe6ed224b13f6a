#!/usr/bin/env bash
# Everything that needs a GPU, in one go, on a machine without network: correctness of every template, then times.
# Needs torch 2.11 or newer and Triton 3.6 or newer in $PYTHON's environment; nothing is installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TRITON_DEFAULT_FP_FUSION=0 OMP_WAIT_POLICY=PASSIVE
exec "${PYTHON:-python3}" benchmarks/device.py "$@"
