#!/usr/bin/env bash
# The SGLang plugin under SGLang itself, on CPU: PyPI's sglang in a venv of its own (.venv-sglang, about 2 GB), one and
# two gloo ranks. Takes some minutes. Writes benchmarks/results/tests/sglang_cpu.json, which
# tests/unit/test_engine_results.py holds against the files it was made with. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
sglang=0.5.17
torch=2.13.0+cpu # a CPU build; SGLang's own pin is CUDA's 2.11
python=.venv-sglang/bin/python
[ -x "$python" ] || "${PYTHON:-python3}" -m venv .venv-sglang
pip() { "$python" -m pip --disable-pip-version-check install --quiet --quiet "$@"; }

wanted="$sglang $torch"
if [ "$(cat .venv-sglang/.eprt 2>/dev/null)" != "$wanted" ]; then
  echo "test_sglang: installing sglang $sglang into .venv-sglang (once)"
  pip "torch==$torch" packaging "setuptools>=77"
  pip --no-deps "sglang==$sglang"
  # Those of its requirements that text on a CPU loads; tests/support/sglang_cpu stands in for what it only imports.
  "$python" - >.venv-sglang/requirements.txt <<'P'
from importlib.metadata import requires

from packaging.requirements import Requirement

used = """aiohttp apache-tvm-ffi compressed-tensors einops fastapi gguf interegular ipython msgspec numpy openai orjson
partial_json_parser pillow prometheus-client psutil pybase64 pydantic python-multipart pyzmq requests scipy sentencepiece
setproctitle tiktoken tqdm transformers uvicorn uvloop watchfiles xgrammar xxhash zstandard""".split()
for line in requires("sglang") or []:
    need = Requirement(line)
    if need.name.lower() in used and (need.marker is None or need.marker.evaluate({"extra": ""})):
        print(f"{need.name}{need.specifier}")
P
  echo "torch==$torch" >.venv-sglang/constraint.txt
  # pip names what was left out as missing; that is meant. SGLang imports triton and dill, and never launches a kernel.
  pip -c .venv-sglang/constraint.txt -r .venv-sglang/requirements.txt triton==3.6.0 dill loguru safetensors accelerate \
    pytest pytest-timeout hypothesis tyro rich 2>/dev/null
  echo "$wanted" >.venv-sglang/.eprt
fi
pip --no-deps --no-build-isolation -e .

export OMP_NUM_THREADS=1 PYTHONPATH="$PWD/tests/support/sglang_cpu${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m pytest -q -p no:cacheprovider --timeout 900 tests/integrations/test_sglang.py \
  --results benchmarks/results/tests/sglang_cpu.json "$@"
