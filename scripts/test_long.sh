#!/usr/bin/env bash
# Passes the tests that need no GPU and are long (tests/support/long_tests.py names them): kernels that are compiled or
# interpreted, launchers, the larger part of the matrices; first what lies between hosts. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/test_hosts.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
bash scripts/pytest.sh -m "long and not gpu" --ignore tests/hosts -n 2 --dist load --maxschedchunk 1 --durations 12 "$@"
