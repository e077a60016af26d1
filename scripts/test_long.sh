#!/usr/bin/env bash
# Passes the tests that need no GPU and are long (tests/support/long_tests.py names them): kernels that are compiled or
# interpreted, launchers, the larger part of the matrices; beside them, as it mostly waits, what lies between hosts,
# whose output comes in one piece when it has ended. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh test
log=$(mktemp)
trap 'rm -f "$log"' EXIT
between_hosts() {
  local code=0
  bash scripts/test_hosts.sh >"$log" 2>&1 || code=$?
  cat "$log"
  return $code
}
between_hosts &
hosts=$!
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
failed=0
bash scripts/pytest.sh -m "long and not gpu" --ignore tests/hosts --ignore tests/gpu -n 2 --dist loadgroup --durations 12 "$@" ||
  failed=$?
wait $hosts || failed=$?
exit $failed
