#!/usr/bin/env bash
# Every result file that needs GPUs, the most wanted first, each written as soon as its part is done.
#
#   bash scripts/gpu_session.sh 1 [options]     what one GPU shows: executors, router, eprt tune, the GPU tests
#   bash scripts/gpu_session.sh 2 [options]     what two GPUs of one host show: layers, steps, placements, transports,
#                                               the GPU tests, lost ranks, and inside vLLM where it is installed;
#                                               two GPUs that are taken for two hosts (NCCL=libnccl.so.2, 2.32 or later)
#
#   --out FOLDER      where results go, logs and session_1.tsv beside them; benchmarks/results if not said
#   --seconds N       for all parts together; a part gets what is left, at most its own limit, and is ended then
#   --only A,B        these parts, in the table's order        --list   name the parts and their commands
#   --rehearse        the same commands, tiny, on the CPU (what times GPU kernels must refuse for want of a GPU)
#
# Benches keep what they found when they are ended; faults and vllm_* go on with it the next time. Exit code: how many
# parts failed. Uses .venv if there is one, else PYTHON (default python3).
set -euo pipefail
cd "$(dirname "$0")/.."
gpus=${1:-} out=benchmarks/results seconds=36000 only="" rehearse="" list=""
[ "$gpus" = 1 ] || [ "$gpus" = 2 ] || { sed -n '2,17s/^# \{0,1\}//p' "$0" >&2; exit 2; }
shift
while [ $# -gt 0 ]; do
  case $1 in
    --out) out=$2; shift 2 ;;
    --seconds) seconds=$2; shift 2 ;;
    --only) only=,$2,; shift 2 ;;
    --rehearse) rehearse=yes; shift ;;
    --list) list=yes; shift ;;
    *) echo "$1: no such option" >&2; exit 2 ;;
  esac
done
python=${PYTHON:-python3}
[ ! -x .venv/bin/python ] || python=.venv/bin/python
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
name='import torch; print(torch.cuda.get_device_name().split()[1].lower() if torch.cuda.is_available() else "cpu")'
case $list$rehearse in
  "") machine=$("$python" -c "$name")_x$gpus ;;
  *) machine=rehearsed_x$gpus ;;
esac
failed=0 started=$SECONDS
tell() { printf '%s\n' "$*" >&2; }
if [ -z "$list" ]; then
  mkdir -p "$out/logs" "$out/tests"
  printf 'part\toutcome\tseconds\tresult\tcommand\n' >"$out/session_$gpus.tsv"
fi

# part NAME LIMIT RESULT COMMAND...: run it, tell how it ended. In COMMAND, {} is the result's path.
part() {
  local part=$1 limit=$2 result=$out/$3 left begun=$SECONDS outcome=ok code=0
  shift 3
  local command=("${@//\{\}/$result}")
  [ -z "$only" ] || [[ $only == *",$part,"* ]] || return 0
  [ -z "$list" ] || { printf '%-14s %5s s  %s\n' "$part" "$limit" "${command[*]}"; return 0; }
  left=$((seconds - (SECONDS - started)))
  if [ "$left" -lt 10 ]; then
    outcome="no time left"
  else
    tell "== $part (at most $((left < limit ? left : limit)) s): ${command[*]}"
    # As by Ctrl-C: a command then ends the ranks that it started, also where this script runs in the background.
    timeout --signal=INT --kill-after=30 "$((left < limit ? left : limit))" env --default-signal=INT "${command[@]}" \
      >"$out/logs/$part.log" 2>&1 || code=$?
    case $code in
      0) ;;
      124 | 137) outcome="ended after $((SECONDS - begun)) s" ;;
      *) outcome="exit code $code" ;;
    esac
    # A rehearsal has no GPU to time: the command's arguments were right if that is all it says.
    if [ -n "$rehearse" ] && [ "$code" = 2 ] && grep -q 'no CUDA device here' "$out/logs/$part.log"; then
      outcome="ok: refused for want of a GPU"
    fi
  fi
  [[ $outcome == ok* ]] || { failed=$((failed + 1)) && tail -n 3 "$out/logs/$part.log" >&2 2>/dev/null || true; }
  printf '%s\t%s\t%s\t%s\t%s\n' "$part" "$outcome" "$((SECONDS - begun))" "$result" "${command[*]}" \
    >>"$out/session_$gpus.tsv"
  tell "   $part: $outcome, $((SECONDS - begun)) s"
}

run=("$python" -m eprt)

# sized REAL... / TINY...: `sizes` are the words of the one, or in a rehearsal of the other.
sized() {
  local word side="" want=${rehearse:+tiny}
  sizes=()
  for word in "$@"; do
    if [ "$word" = / ]; then side=tiny; elif [ "$side" = "$want" ]; then sizes+=("$word"); fi
  done
}

experts() { # NAME LIMIT SHAPES... OPTIONS...
  local part=$1 limit=$2
  shift 2
  part "$part" "$limit" "${part}_$machine.json" "${run[@]}" bench experts --tokens 8 32 128 512 2048 8192 --output {} \
    --shapes "$@"
}

tests() {
  if [ -n "$rehearse" ]; then
    part tests 300 tests/none.json "$python" -m pytest -m gpu tests/gpu -q --collect-only
  else
    part tests 1500 "tests/$machine.json" bash scripts/test_gpu.sh -q --results {}
  fi
}

one_gpu() {
  experts experts_bf16 300 qwen3-30b-a3b
  experts experts_fp8 400 deepseek-v3-fp8
  experts experts_mxfp4 600 gpt-oss-120b deepseek-v4-flash deepseek-v3
  sized --model gpt-oss-120b / --device cpu --model "$out/logs/tiny.json" --tokens 4 --budget-s 40
  part tune 230 "tune_$machine.json" env "EPRT_PLAN_ROWS=$out/logs/rows_$machine.json" \
    "${run[@]}" tune --world 1 --output {} "${sizes[@]}"
  part router 200 "router_$machine.json" "${run[@]}" bench router --output {}
  tests
  experts experts_w8a8 400 deepseek-v3-fp8 gpt-oss-120b --low-precision-activations
  experts experts_more 900 mixtral-8x7b glm-4.5-air kimi-k2-fp8 deepseek-v3-nvfp4
  local loads=(--batches 1 4 16 64 256 --prefill 48 --mixed 256 --starts 1 --plugins none none:marlin eprt)
  duel gpt-oss-20b 1 "${loads[@]}"
  duel qwen3 1 "${loads[@]}" --layers 48 --plugins none eprt
}

# duel MODEL DP OPTIONS...: inside vLLM, where it is installed.
duel() {
  local model=$1 dp=$2
  shift 2
  if [ -z "$list" ] && ! "$python" -c 'import vllm' 2>/dev/null; then
    tell "== vllm_$model: vLLM isn't installed, left out"
    return 0
  fi
  sized "$@" --resume / --tiny --device cpu --plugins eprt --batches 1
  part "vllm_$model" 1700 "vllm_${model}_$machine.json" "$python" benchmarks/vllm_duel.py --models "$model" --dp "$dp" \
    --json {} "${sizes[@]}"
}

two_gpus() {
  sized --shapes gpt-oss-120b qwen3-30b-a3b deepseek-v3-fp8 --tokens 1 8 32 128 512 2048 / \
    --device cpu --shapes tiny --tokens 1 4
  part layer 700 "layer_$machine.json" "${run[@]}" bench layer --world 2 --output {} "${sizes[@]}"
  sized --models gpt-oss-120b qwen3-30b-a3b deepseek-v3 / --device cpu --models tiny --tokens 1 3 --layers 1 --rounds 1
  part step 600 "step_$machine.json" "${run[@]}" bench step --world 2 --output {} "${sizes[@]}"
  sized --shapes gpt-oss-120b qwen3-30b-a3b --tokens 32 128 2048 8192 / --device cpu --shapes tiny --tokens 64
  part placed 400 "placed_$machine.json" "${run[@]}" bench layer --world 2 --routing zipf:1.1 --replicas 16 --output {} \
    "${sizes[@]}"
  part placed_even 400 "placed_even_$machine.json" "${run[@]}" bench layer --world 2 --routing uniform --replicas 16 \
    --output {} "${sizes[@]}"
  sized --routings uniform / --device cpu --tokens 2 --shapes h2880k4 --routings uniform
  part dispatch 500 "dispatch_$machine.json" "${run[@]}" bench dispatch --world 2 --output {} "${sizes[@]}"
  tests
  sized --device cuda --jobs 10 --resume / --trials 1 --world 2
  part faults 1200 "faults_$machine.json" "${run[@]}" doctor --faults --output {} "${sizes[@]}"
  sized --device cuda ${NCCL:+--nccl "$NCCL"} / --device cpu
  part two_hosts 170 "two_hosts_$machine.json" "$python" benchmarks/two_hosts.py --output {} "${sizes[@]}"
  for model in gpt-oss qwen3 deepseek-v3; do duel "$model" 2 --batches 1 32 128 --starts 2; done
  sized --shapes gpt-oss-120b qwen3-30b-a3b --tokens 1 32 512 2048 / --device cpu --shapes tiny --tokens 2
  part layer_pairs 1500 "layer_pairs_$machine.json" "${run[@]}" bench layer --world 2 --every-pair --output {} \
    "${sizes[@]}"
  sized --shapes mixtral-8x7b glm-4.5-air kimi-k2-fp8 --tokens 1 32 512 2048 / --device cpu --shapes tiny --tokens 2
  part layer_more 900 "layer_more_$machine.json" "${run[@]}" bench layer --world 2 --output {} "${sizes[@]}"
  sized --rounds 1000 / --device cpu --rounds 20
  part exchange 100 "exchange_$machine.json" "${run[@]}" bench exchange --world 2 --output {} "${sizes[@]}"
}

if [ -n "$rehearse" ] && [ -z "$list" ]; then
  printf '{"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": 8, "num_experts_per_tok": 2, %s}' \
    '"hidden_size": 64, "moe_intermediate_size": 32' >"$out/logs/tiny.json"
fi
if [ "$gpus" = 1 ]; then one_gpu; else two_gpus; fi
[ -z "$list" ] || exit 0
tell "$failed parts failed; $out/session_$gpus.tsv lists all"
exit "$failed"
