#!/bin/bash
# start.sh COMMAND …: on the GPU machine, from the root of a checkout, with the kit's parts in .gpu-kit (bundle.sh and bundle_training.sh make them).
#   unpack                                  what there is of the kit, each part once a machine; shared memory made large enough for several versions
#   model                                   SmolLM2 from its two pieces as a folder to train, once a machine
#   py ARGS…                                python3 with those packages and this checkout
#   serve NAME GPU PORT MODEL [FLAGS…]      an SGLang server in a session of its own; returns once it answers
#   stop NAME                               end it with all its children
# Packages, logs and compiled kernels lie in $KIT_WORK, outside the checkout, and serve every later call.
set -u
KIT=${KIT:-.gpu-kit}
export KIT_WORK=${KIT_WORK:-${TMPDIR:-/tmp}/gpu-kit}
SITE=$KIT_WORK/site
HERE=$(cd "$(dirname "$0")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
mkdir -p "$KIT_WORK"

export PYTHONPATH=$HERE/stand_ins:$SITE:$ROOT PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export SGLANG_IS_FLASHINFER_AVAILABLE=false TVM_FFI_CACHE_DIR=$KIT_WORK/jit TRITON_CACHE_DIR=$KIT_WORK/triton
export NCCL_CUMEM_ENABLE=0 # what SGLang sets for itself; a sender with another value hangs
if [ -z "${CUDA_HOME:-}" ] && command -v nvcc >/dev/null; then
  CUDA_HOME=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
  export CUDA_HOME
fi

unpack() {
  # Shared memory is half of what the machine reports at its start, which is less than what it has.
  mount -o remount,size="${SHM_GB:-200}G" /dev/shm 2>/dev/null || echo "shared memory stays at $(df -h --output=size /dev/shm | tail -1)"
  local file name into
  for file in "$KIT"/part*/*; do
    name=$(basename "$file")
    [ -e "$KIT_WORK/kit/$name" ] && continue
    case $name in
      site.tar.xz | tasks.tar.xz | *.whl) into=$SITE ;;
      shape.tar.xz) into=$KIT_WORK/shape ;;
      smollm2.gguf.*) into= ;;
      *) continue ;;
    esac
    mkdir -p "$KIT_WORK/kit"
    if [ -n "$into" ]; then
      mkdir -p "$into"
      case $name in *.whl) python3 -m zipfile -e "$file" "$into" || exit 1 ;; *) tar -C "$into" -xJf "$file" || exit 1 ;; esac
      touch "$KIT_WORK/kit/$name"
    else
      cp "$file" "$KIT_WORK/kit/.$name" && mv "$KIT_WORK/kit/.$name" "$KIT_WORK/kit/$name" || exit 1
    fi
    echo "unpacked $name"
  done
}

model() {
  [ -d "$KIT_WORK/smollm2" ] && return
  local kit=$KIT_WORK/kit gguf=$KIT_WORK/smollm2.gguf
  cat "$kit"/smollm2.gguf.xz.[01] | xz -d >"$gguf" || exit 1
  [ "$(sha256sum <"$gguf" | cut -c 1-64)" = "$(cat "$kit/smollm2.gguf.sha256")" ] || { echo "the pieces of the model are not all here, or damaged" >&2; exit 1; }
  python3 -m benchmarks.gpu.smollm2 convert "$KIT_WORK/smollm2" --gguf "$gguf" || exit 1
  rm "$gguf"
}

serve() {
  local name=$1 gpu=$2 port=$3 model=$4
  shift 4
  CUDA_VISIBLE_DEVICES=$gpu setsid nohup python3 -m sglang.launch_server --model-path "$model" --host 127.0.0.1 --port "$port" \
    --attention-backend triton --sampling-backend pytorch --grammar-backend none --disable-custom-all-reduce --disable-radix-cache \
    --skip-server-warmup --random-seed 1 --cuda-graph-max-bs-decode 32 "$@" >"$KIT_WORK/$name.log" 2>&1 </dev/null &
  local pid=$!
  echo "$pid" >"$KIT_WORK/$name.pid"
  for _ in $(seq "${SERVE_S:-240}"); do
    kill -0 "$pid" 2>/dev/null || { echo "$name ended at its start:"; tail -n 5 "$KIT_WORK/$name.log"; exit 1; }
    [ "$(curl -s -m 2 -o /dev/null -w '%{http_code}' "http://127.0.0.1:$port/model_info")" = 200 ] && exit 0
    sleep 1
  done
  echo "$name did not answer within ${SERVE_S:-240} s:"
  tail -n 5 "$KIT_WORK/$name.log"
  exit 1
}

stop() {
  local pid
  pid=$(cat "$KIT_WORK/$1.pid" 2>/dev/null) || exit 0
  kill "$pid" 2>/dev/null
  for _ in $(seq 20); do
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.5
  done
  kill -9 -- "-$pid" 2>/dev/null # whatever is left of its session
  rm -f "$KIT_WORK/$1.pid"
}

command=${1:?unpack, model, py, serve or stop}
shift
case $command in
  unpack) unpack ;;
  model) model ;;
  py) exec python3 "$@" ;;
  serve) serve "$@" ;;
  stop) stop "$@" ;;
  *) echo "unknown command $command" >&2; exit 2 ;;
esac
