#!/usr/bin/env bash
# Sets up and runs the main job: 4 gloo ranks drive the MoE layers of a tiny MXFP4 gpt-oss checkpoint, every output
# checked. Arguments replace the default ones of `eprt run`.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh run
[ $# -gt 0 ] || set -- --world 4 --device cpu
exec .venv/bin/eprt run "$@"
