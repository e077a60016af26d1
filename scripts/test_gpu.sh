#!/usr/bin/env bash
# The tests that need GPUs, in one pytest process that drives the ranks; fails if all of them skip. Arguments go to
# pytest: files of tests/gpu stand for all of them; --results FILE writes what passed on this machine. Uses .venv if
# there is one, else PYTHON (default python3).
set -euo pipefail
cd "$(dirname "$0")/.."
[[ " $*" == *" tests/gpu"* ]] || set -- tests/gpu "$@"
bash scripts/pytest.sh -m gpu "$@" || {
  echo "GPU tests failed, or none ran: are there CUDA devices, and a CUDA build of torch?" >&2
  exit 1
}
