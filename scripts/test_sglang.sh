#!/usr/bin/env bash
# The SGLang plugin under SGLang itself, on CPU: PyPI's sglang in a venv of its own (.venv-sglang, about 2 GB), one and
# two gloo ranks. Takes some minutes. Writes benchmarks/results/tests/sglang_cpu.json, which
# tests/unit/test_engine_results.py holds against the files it was made with. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
sglang=${SGLANG:-0.5.17} # SGLANG=0.5.23 runs the newest, in the same venv
torch=2.13.0+cpu # a CPU build; SGLang's own pin is CUDA's 2.11
python=.venv-sglang/bin/python
[ -x "$python" ] || "${PYTHON:-python3}" -m venv .venv-sglang
pip() { "$python" -m pip --disable-pip-version-check install --quiet --quiet "$@"; }

wanted="$sglang $torch $(cksum <scripts/requirements-sglang.txt)"
if [ "$(cat .venv-sglang/.eprt 2>/dev/null)" != "$wanted" ]; then
  echo "test_sglang: installing sglang $sglang into .venv-sglang (once)"
  pip "torch==$torch" "setuptools>=77"
  # The requirements that text on a CPU loads, each at the version that the tests last ran with; SGLang's own list is
  # CUDA's. tests/support/sglang_cpu stands in for what it only imports.
  pip --no-deps "sglang==$sglang" -r scripts/requirements-sglang.txt
  echo "$wanted" >.venv-sglang/.eprt
fi
pip --no-deps --no-build-isolation -e .

export OMP_NUM_THREADS=1 PYTHONPATH="$PWD/tests/support/sglang_cpu${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m pytest -q -p no:cacheprovider --timeout 900 tests/integrations/test_sglang.py \
  --results benchmarks/results/tests/sglang_cpu.json "$@"
