#!/usr/bin/env bash
# What zerokl needs beside torch, triton and transformers, as wheels in a folder: for a GPU machine
# that has those and no network.
#   benchmarks/wheels.sh FOLDER [VERSION]      VERSION: of the machine's Python, 3.12 without it
# On the machine:
#   python3 -m pip install --no-index --no-deps --upgrade --target SITE FOLDER/*.whl
#   PYTHONPATH=SITE benchmarks/device.sh
set -euo pipefail
if [ $# -lt 1 ] || [ -e "$1" ]; then
  echo "wheels: name a folder that does not exist yet" >&2
  exit 2
fi
platforms=(manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64)
"${PYTHON:-python3}" -m pip download -q --only-binary=:all: --implementation cp --python-version "${2:-3.12}" \
  "${platforms[@]/#/--platform=}" -d "$1" \
  "pydantic>=2.10" "cyclopts>=4" "tomli_w>=1.1" "filelock>=4" "waitress>=3" "typing_extensions>=4.16"
du -sh "$1"
