#!/usr/bin/env bash
# The tests that need GPUs, in one pytest process that drives the ranks; fails if all of them skip. Arguments go to
# pytest: files of tests/gpu stand for all of them; --results FILE writes what passed on this machine. Uses .venv if
# there is one, else PYTHON (default python3).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
[ ! -x .venv/bin/python ] || python=.venv/bin/python
[[ " $*" == *" tests/gpu"* ]] || set -- tests/gpu "$@"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} "$python" -m pytest -m gpu "$@" | tee "$log"
if ! tail -n 1 "$log" | grep -q ' passed'; then
  echo "no GPU test passed: are there CUDA devices, and a CUDA build of torch?" >&2
  exit 1
fi
