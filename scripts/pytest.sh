#!/usr/bin/env bash
# Runs pytest and fails where no test passed: pytest is content when every test was skipped. Arguments go to pytest,
# whose closing line stays the last one. Uses .venv if there is one, else PYTHON (default python3).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
[ ! -x .venv/bin/python ] || python=.venv/bin/python
# Tests start interpreters; none of them should compile the package's sources again.
unset PYTHONDONTWRITEBYTECODE
log=$(mktemp)
trap 'rm -f "$log"' EXIT
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} "$python" -m pytest "$@" | tee "$log"
if ! tail -n 1 "$log" | grep -q ' passed'; then
  echo "no test passed" >&2
  exit 1
fi
