#!/usr/bin/env bash
# Exactness and rates on a GPU, in parts of at most four minutes each. It needs a Python with torch, triton and
# transformers, and the packages of wheels.sh. Nothing is installed.
#   benchmarks/device.sh PART            one of those that the line "parts" below names; all (the default) runs
#                                        one after another. Each part writes a file into
#                                        benchmarks/results/<gpu>/. The exit code is 1 where a bit is unequal,
#                                        3 where something did not run.
#   RESULTS=<folder> benchmarks/device.sh      another folder for the files, in place of benchmarks/results
#   benchmarks/device.sh PART --device cpu --small     anywhere: the same code with toy sizes; it measures nothing
#   PYTHON=... benchmarks/device.sh      another interpreter
#   VLLM=<folder that holds vllm/> benchmarks/device.sh      a vLLM that is not installed; its Python files alone
#                                        are enough for its Triton kernels
#   TRL_PYTHON=... benchmarks/device.sh step                 the interpreter that has TRL, where it is another
#   COMMIT=<hash> benchmarks/device.sh   the commit for the results, where the files are without their history
set -euo pipefail
if [ -n "${VLLM:-}" ] && [ ! -d "$VLLM/vllm" ]; then
  echo "device: VLLM ($VLLM) must be a folder that holds vllm/" >&2
  exit 2
fi
parts=all
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
  parts="$1"
  shift
fi
[ "$parts" = all ] && parts="exact kernels step decode decode-vllm vllm vllm-runs models families long ranks"
root="$(cd "$(dirname "$0")/.." && pwd)"
# The repository root is the package: a link by its name makes it importable without an installation.
link="$(mktemp -d)"
trap 'rm -rf "$link"' EXIT
ln -s "$root" "$link/zerokl"
export PYTHONPATH="$link${VLLM:+:$VLLM}${PYTHONPATH:+:$PYTHONPATH}"
code=0
for part in $parts; do
  timeout -k 5 240 "${PYTHON:-python3}" -P -m zerokl.benchmarks.device "$part" "$@" || code=$?
done
exit $code
