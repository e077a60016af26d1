#!/usr/bin/env bash
# An SGLang server with data-parallel attention and experts over all of its ranks, run by eprt's plugin.
#   launch/sglang_serve.sh MODEL                          every GPU of this host
#   RANKS=4 launch/sglang_serve.sh MODEL --port 30001     so many ranks; further arguments go to SGLang
# Several hosts: RANKS is those of all of them; add SGLang's own --nnodes, --node-rank and --dist-init-addr.
set -euo pipefail
[ $# -gt 0 ] || { echo "usage: launch/sglang_serve.sh MODEL [SGLang arguments]" >&2; exit 2; }
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
ranks=${RANKS:-$gpus}
[ "$ranks" -gt 0 ] || { echo "no GPU here: set RANKS" >&2; exit 2; }
export SGLANG_PLUGINS=${SGLANG_PLUGINS:-eprt}
split=()
[ "$ranks" -eq 1 ] || split=(--tp-size "$ranks" --dp-size "$ranks" --ep-size "$ranks" --enable-dp-attention)
exec sglang serve --model-path "$1" "${split[@]}" "${@:2}"
