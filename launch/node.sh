#!/usr/bin/env bash
# A DP+EP world on this host under torchrun: one rank for each GPU, or RANKS gloo ranks.
#   launch/node.sh                                    eprt run on every GPU (4 gloo ranks without one)
#   RANKS=2 launch/node.sh -m eprt run --model DIR    another number of ranks, a checkpoint
#   MAX_RESTARTS=3 launch/node.sh my_engine.py        your own program; a lost rank starts all of them again, and
#                                                     world.generation says how often
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
[ ! -x "$here/.venv/bin/python" ] || [ -n "${PYTHON:-}" ] || python=$here/.venv/bin/python
ranks=${RANKS:-$("$python" -c 'import torch; print(torch.cuda.device_count() or 4)')}
[[ $ranks =~ ^[1-9][0-9]*$ ]] || { echo "RANKS=$ranks: expected a number from 1 on" >&2; exit 2; }
[ $# -gt 0 ] || set -- -m eprt run
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m torch.distributed.run \
  --standalone \
  --nproc-per-node "$ranks" \
  --max-restarts "${MAX_RESTARTS:-0}" \
  "$@"
