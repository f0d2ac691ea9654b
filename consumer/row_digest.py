"""A digest of weights that are on a device, computed there: a few bytes a row leave it, not the weights.

Each tensor's bytes are read as little-endian 64-bit words, the last one filled up with zeros, in rows of 8192 words. A row's sum is, modulo 2^64,

    sum over i of mix(word[i] + (i + 1) * GOLDEN)

`mix` being splitmix64's finaliser, a bijection of words. The digest is xxh3-128 over names, dtypes, shapes and row sums, in the order of names, after a mark
that keeps it apart from `weights_digest`, whose value it never has.

What it guards: equal weights give equal digests, on any device and however they were computed. A changed word always changes its row's sum. Any other
accident (changed, lost, swapped or repeated words or rows) goes unseen in a row with a chance of 2^-64, and in a version only if unseen in every row it
touches. It is no defence against somebody who makes weights in order to deceive; published bytes have checksums of their own.

Source: the mix of G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators" (2014), as in Java 8's SplittableRandom.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterable, Mapping

import torch
import xxhash
from torch import Tensor

from consumer.nvrtc import Kernel, KernelUnavailable
from consumer.tensor_bytes import DTYPES

MARK = "rows1-"
"""Begins every such digest."""
ROW_WORDS = 8192
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = 8
_THREADS = 256
_PIECE_ROWS = 256
"""Rows at a time where torch's own operations do it: 16 MB and as much again, which stay in a large cache."""
_MOST_ROWS = 1 << 17
"""Rows of one launch: 8 GB, so that words are counted in 32 bits."""
_SOURCE = """
extern "C" __global__ void row_sums(const unsigned char* bytes, unsigned long long* sums, int words, int tail) {
  const unsigned long long* data = (const unsigned long long*)bytes;
  const int first = blockIdx.x * ROW;
  unsigned long long total = 0;
  if (words - first >= ROW) {
    #pragma unroll 8
    for (int at = threadIdx.x; at < ROW; at += THREADS) total += mix(data[first + at] + (at + 1) * GOLDEN);
  } else {
    for (int at = threadIdx.x; at < words - first; at += THREADS) total += mix(data[first + at] + (at + 1) * GOLDEN);
    if (tail && threadIdx.x == 0) {
      unsigned long long last = 0;
      for (int i = 0; i < tail; i++) last |= (unsigned long long)bytes[8LL * words + i] << (8 * i);
      total += mix(last + (words - first + 1) * GOLDEN);
    }
  }
  __shared__ unsigned long long parts[THREADS];
  parts[threadIdx.x] = total;
  __syncthreads();
  for (int half = THREADS / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = parts[0];
}
"""
_MIX = """
__device__ __forceinline__ unsigned long long mix(unsigned long long z) {
  z = (z ^ (z >> 30)) * FIRST;
  z = (z ^ (z >> 27)) * SECOND;
  return z ^ (z >> 31);
}
"""
_LOG = logging.getLogger(__name__)


def row_digest(parts: Iterable[Mapping[str, Tensor]]) -> str:
    """The digest of all tensors of all `parts`, whole ones (see `consumer.gather`) on one device. Blocks until the device has computed it."""
    pending: dict[str, tuple[bytes, Tensor]] = {}
    for part in parts:
        for name, tensor in part.items():
            pending[name] = (f"{name}\0{DTYPES[tensor.dtype]}\0{list(tensor.shape)}\0".encode(), row_sums(tensor))
    names = sorted(pending)
    total = xxhash.xxh3_128()
    if names:
        sums = torch.cat([pending[name][1] for name in names]).cpu().numpy()
        at = 0
        for name in names:
            about, mine = pending[name]
            total.update(about)
            total.update(sums[at : at + mine.numel()].tobytes())
            at += mine.numel()
    return MARK + total.hexdigest()


@torch.no_grad()
def row_sums(tensor: Tensor, *, kernel: bool = True) -> Tensor:
    """[rows] int64, the sums of a tensor's rows on its device, not waited for. `kernel`: by a kernel of its own where there is one; the sums are the same."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.int64, device=tensor.device)
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.data_ptr() % _WORD:
        flat = flat.clone()
    rows = -(-flat.numel() // (_WORD * ROW_WORDS))
    if kernel and flat.is_cuda and (compiled := _kernel(flat.device)) is not None:
        return _by_kernel(compiled, flat, rows)
    return _by_torch(flat)


def _by_kernel(kernel: Kernel, flat: Tensor, rows: int) -> Tensor:
    sums = torch.empty(rows, dtype=torch.int64, device=flat.device)
    stream = torch.cuda.current_stream(flat.device).cuda_stream
    for first in range(0, rows, _MOST_ROWS):
        piece = flat[first * ROW_WORDS * _WORD : (first + _MOST_ROWS) * ROW_WORDS * _WORD]
        words, tail = divmod(piece.numel(), _WORD)
        arguments = (ctypes.c_void_p(piece.data_ptr()), ctypes.c_void_p(sums[first:].data_ptr()), ctypes.c_int(words), ctypes.c_int(tail))
        kernel(grid=min(_MOST_ROWS, rows - first), block=_THREADS, arguments=arguments, stream=stream)
    return sums


def _by_torch(flat: Tensor) -> Tensor:
    whole = flat.numel() // _WORD * _WORD
    words = flat[:whole].view(torch.int64)
    if whole < flat.numel():
        last = torch.zeros(_WORD, dtype=torch.uint8, device=flat.device)
        last[: flat.numel() - whole] = flat[whole:]
        words = torch.cat([words, last.view(torch.int64)])
    keys = torch.arange(1, ROW_WORDS + 1, dtype=torch.int64, device=flat.device) * _signed(_GOLDEN)
    size = ROW_WORDS * _PIECE_ROWS
    sums = [_piece_sums(words[at : at + size], keys) for at in range(0, words.numel(), size)]
    return torch.cat(sums)


def _piece_sums(words: Tensor, keys: Tensor) -> Tensor:
    full = words.numel() // ROW_WORDS * ROW_WORDS
    sums = [_mixed(words[:full].view(-1, ROW_WORDS) + keys).sum(1)]
    if full < words.numel():
        rest = words[full:]
        sums.append(_mixed(rest + keys[: rest.numel()]).sum(0, keepdim=True))
    return torch.cat(sums)


def _mixed(z: Tensor) -> Tensor:
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        z ^= (z >> shift).bitwise_and_((1 << (64 - shift)) - 1)  # torch shifts the sign in
        if factor is not None:
            z *= _signed(factor)
    return z


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


@functools.cache
def _kernel(device: torch.device) -> Kernel | None:
    constants = f"#define ROW {ROW_WORDS}\n#define THREADS {_THREADS}\n#define GOLDEN {_GOLDEN}ULL\n#define FIRST {_FIRST}ULL\n#define SECOND {_SECOND}ULL\n"
    try:
        return Kernel(constants + _MIX + _SOURCE, "row_sums", device)
    except KernelUnavailable as problem:
        _LOG.warning("%s: digests of weights on %s are computed by torch's own operations, which is slower", problem, device)
        return None
