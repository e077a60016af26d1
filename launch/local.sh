#!/usr/bin/env bash
# A DP+EP world on this host under torchrun: one rank for each GPU, or RANKS gloo ranks.
#   launch/local.sh                                   eprt run on every GPU (4 gloo ranks without one)
#   RANKS=2 launch/local.sh -m eprt run --model DIR   another number of ranks, a checkpoint
#   launch/local.sh my_engine.py --flag               your own program
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
[ ! -x .venv/bin/python ] || python=.venv/bin/python
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
ranks=${RANKS:-$((gpus > 0 ? gpus : 4))}
[ $# -gt 0 ] || set -- -m eprt run
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" "$@"
