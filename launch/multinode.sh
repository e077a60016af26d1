#!/usr/bin/env bash
# A DP+EP world over several hosts: the same command on each of them, all within a few minutes.
#   NODES=2 HEAD=host0 launch/multinode.sh -m eprt run --model DIR
# HEAD: a host of the job that all others reach, the first by custom; it serves the rendezvous on PORT (29400).
# JOB: any text that no other job on HEAD:PORT uses. RANKS: ranks a node, one for each GPU unless set.
# MAX_RESTARTS: how often a node starts its ranks again when one is lost anywhere; all nodes meet again each time.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
: "${NODES:?how many hosts take part}" "${HEAD:?name or address of the host that serves the rendezvous}"
python=${PYTHON:-python3}
[ ! -x "$here/.venv/bin/python" ] || [ -n "${PYTHON:-}" ] || python=$here/.venv/bin/python
ranks=${RANKS:-$("$python" -c 'import torch; print(torch.cuda.device_count() or 4)')}
[[ $ranks =~ ^[1-9][0-9]*$ ]] || { echo "RANKS=$ranks: expected a number from 1 on" >&2; exit 2; }
[ $# -gt 0 ] || set -- -m eprt run
# Hosts may share a name, and containers a process number: torchrun tells its nodes apart by this host's address.
address=$("$python" -c 'import socket, sys
kind, _, _, _, where = socket.getaddrinfo(sys.argv[1], 9, type=socket.SOCK_DGRAM)[0]
probe = socket.socket(kind, socket.SOCK_DGRAM)
probe.connect(where)  # sends nothing
print(probe.getsockname()[0])' "$HEAD" 2>/dev/null || true)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m torch.distributed.run \
  --nnodes "$NODES" \
  --nproc-per-node "$ranks" \
  --max-restarts "${MAX_RESTARTS:-0}" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$HEAD:${PORT:-29400}" \
  --rdzv-id "${JOB:-eprt}" \
  ${address:+--local-addr "$address"} \
  "$@"
