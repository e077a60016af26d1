#!/usr/bin/env bash
# Sets up and passes everything that needs no GPU: linters, type checker, tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh test
bin=.venv/bin

"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/pyright" --pythonpath "$bin/python"
"$bin/shellcheck" scripts/*.sh launch/*.sh launch/*.sbatch .ci/run
"$bin/mkdocs" build --quiet --strict

log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Whoever is free takes the next test; tests/conftest.py has the long files first.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$bin/python" -m pytest -n 2 --dist load --maxschedchunk 1 -m "not gpu" \
  --durations 12 "$@" | tee "$log"
# pytest is content when every test skipped; we are not. Its closing line stays the last one.
if ! tail -n 1 "$log" | grep -q ' passed'; then
  echo "no test passed" >&2
  exit 1
fi
