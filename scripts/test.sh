#!/usr/bin/env bash
# Sets up and passes linters, the type checker, the pages and the tests that need no GPU and are not long, in about five
# minutes on two cores; scripts/test_long.sh runs the long ones. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh test
bin=.venv/bin

"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/shellcheck" scripts/*.sh launch/*.sh launch/*.sbatch .ci/run

# Pages and types take one core for a minute, so the tests begin beside them; what is wrong is shown after these.
log=$(mktemp)
trap 'rm -f "$log"' EXIT
{ "$bin/mkdocs" build --quiet --strict && "$bin/pyright" --pythonpath "$bin/python"; } >"$log" 2>&1 &
beside=$!

# Whoever is free takes the next test, or group of them; tests/support/long_tests.py has both. Three on two cores: many
# tests wait for a rank's silence or a timeout.
failed=0
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
bash scripts/pytest.sh -m "not gpu and not long" --ignore tests/gpu -n 3 --dist loadgroup --durations 12 "$@" ||
  failed=$?
wait $beside || {
  failed=$?
  cat "$log" >&2
}
exit $failed
