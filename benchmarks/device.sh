#!/usr/bin/env bash
# Exactness, then rates, on a GPU, within 8 minutes. It needs a Python with torch, triton, transformers,
# pydantic and cyclopts. Nothing is installed.
#   benchmarks/device.sh                 on a CUDA machine; results go to benchmarks/results/<gpu>/device.json
#   benchmarks/device.sh --dry-run       anywhere: the same code with toy sizes on the CPU; its figures say
#                                        nothing about a GPU
#   PYTHON=... benchmarks/device.sh      another interpreter
#   VLLM=<folder that holds vllm/> benchmarks/device.sh       vLLM's kernels beside ours
#   COMMIT=<hash> benchmarks/device.sh   the commit for the results, where the files are without their history
set -euo pipefail
if [ -n "${VLLM:-}" ] && [ ! -d "$VLLM/vllm" ]; then
  echo "device: VLLM ($VLLM) must be a folder that holds vllm/" >&2
  exit 2
fi
root="$(cd "$(dirname "$0")/.." && pwd)"
# The repository root is the package: a link by its name makes it importable without an installation.
link="$(mktemp -d)"
trap 'rm -rf "$link"' EXIT
ln -s "$root" "$link/zerokl"
PYTHONPATH="$link${VLLM:+:$VLLM}" timeout 480 "${PYTHON:-python3}" -P "$root/benchmarks/device.py" "$@"
