#!/usr/bin/env bash
# Makes .venv (if it isn't there) and installs eprt into it. Usage: scripts/setup.sh [run|test]
#   run   what `eprt run` needs: torch, safetensors, tyro, rich
#   test  also linters, pytest, transformers, and the kernel libraries whose signatures the tests check
# An installed torch is kept. Without one: torch 2.13.0 exactly where there is no NVIDIA GPU, any torch >= 2.10 else.
set -euo pipefail
cd "$(dirname "$0")/.."

kind=${1:-run}
python=.venv/bin/python
[ -x "$python" ] || "${PYTHON:-python3}" -m venv .venv

done_file=.venv/.eprt-$kind
wanted=$(cat pyproject.toml scripts/setup.sh scripts/requirements-*.txt | cksum)
if [ -f "$done_file" ] && [ "$(cat "$done_file")" = "$wanted" ]; then
  exit 0
fi

# Of 16,000 modules few are ever imported, so Python compiles them then.
pip() { "$python" -m pip --disable-pip-version-check install --no-compile --quiet --quiet "$@"; }
if ! "$python" -c 'import torch' 2>/dev/null; then
  echo "setup: installing torch into .venv (once)"
  if nvidia-smi -L >/dev/null 2>&1; then
    pip 'torch>=2.10'
  else
    pip torch==2.13.0
  fi
fi
# torch is never replaced from here on.
"$python" -m pip --disable-pip-version-check freeze | grep '^torch==' >.venv/torch-constraint.txt
echo "setup: installing eprt and what it needs to $kind into .venv (once)"
if [ "$kind" = test ]; then
  pip --no-warn-conflicts -c .venv/torch-constraint.txt -r scripts/requirements-test.txt -e '.[test,dev,transformers,plot,docs]'
  # --no-deps: their own requirements would bring CUDA packages that signature tests don't need. CUDA builds of torch
  # come with the triton they need. Not beside the rest: pip fails where it meets a package that another one unpacks.
  kernels=(-r scripts/requirements-kernels.txt)
  "$python" -c 'import triton' 2>/dev/null || kernels+=(triton==3.9.0)
  pip --no-deps "${kernels[@]}"
else
  pip -c .venv/torch-constraint.txt -e .
fi
echo "$wanted" >"$done_file"
