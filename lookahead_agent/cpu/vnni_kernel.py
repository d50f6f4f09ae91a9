"""Multiplies int8 by int8 on CPUs with AVX-512 VNNI, as fast as memory delivers the weights.

vLLM's kernel (oneDNN) takes a fifth to a half longer on the few tokens of a decoding pass. The sums are integers, so a
token's outputs do not depend on the batch size.
"""

import ctypes
import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from lookahead_agent.cpu.jit import compiled, parallel_for, pointer, thread_count, thread_index

ROWS = 32  # rows that are interleaved in memory, COLUMNS columns of each at a time: two vectors of 16 sums
COLUMNS = 4  # columns whose products one instruction adds to a sum
_MAX_TOKENS = 12  # of a tile: with two vectors of weights, as many sums as fit the registers
_AHEAD = 4096  # bytes of weights between a load and its prefetch
_ZERO_POINT = 128  # added to the quantized activations, which the instruction takes as unsigned

_FIELDS = 11
_Work = ctypes.c_int64 * _FIELDS  # a work array: the addresses and sizes of one multiplication

_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_WORDS, _FLOATS, _HALVES = ir.VectorType(_I32, 16), ir.VectorType(_F32, 16), ir.VectorType(_I16, 16)


def is_supported() -> bool:
    """Whether this processor has AVX-512 VNNI but no AMX, and numba compiles for this processor."""
    if any(os.environ.get(name) for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")):
        return False
    features = llvmlite.binding.get_host_cpu_features()
    # With AMX, vLLM's kernels multiply a prompt several times as fast.
    return features.get("avx512vnni", False) and not features.get("amx-int8", False)


def _broadcast(builder: Any, value: Any, kind: Any) -> Any:
    """Broadcast a value to every lane of a vector."""
    undefined = ir.Constant(kind, ir.Undefined)
    lanes = ir.Constant(_WORDS, [0] * 16)
    return builder.shuffle_vector(builder.insert_element(undefined, value, _I32(0)), undefined, lanes)


def _as_bf16(builder: Any, floats: Any) -> Any:
    """Round floats to the nearest bf16, ties to even."""
    bits = builder.bitcast(floats, _WORDS)
    high = builder.lshr(bits, ir.Constant(_WORDS, [16] * 16))
    odd = builder.and_(high, ir.Constant(_WORDS, [1] * 16))
    rounded = builder.add(builder.add(bits, ir.Constant(_WORDS, [0x7FFF] * 16)), odd)
    return builder.trunc(builder.lshr(rounded, ir.Constant(_WORDS, [16] * 16)), _HALVES)


def _tile(tokens: int) -> Any:
    """Code that multiplies ROWS rows by `tokens` consecutive tokens, with the sums in registers."""

    @intrinsic
    def tile(_, work, row, token):  # type: ignore[no-untyped-def]
        def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            work, row, token = arguments
            fields = [builder.load(builder.gep(work, [_I64(field)])) for field in range(_FIELDS)]
            weights, inputs, token_scales, scales, corrections, biases, outputs, rows, _, columns, is_bf16 = fields
            add_products = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(_WORDS, [_WORDS] * 3), "llvm.x86.avx512.vpdpbusd.512"
            )
            prefetch = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32]), "llvm.prefetch.p0"
            )
            zeros = ir.Constant(_WORDS, [0] * 16)
            sums = [[cgutils.alloca_once_value(builder, zeros) for _ in range(2)] for _ in range(tokens)]
            first = builder.add(weights, builder.mul(row, columns))
            token_offsets = [builder.mul(builder.add(token, _I64(index)), columns) for index in range(tokens)]
            with cgutils.for_range_slice(builder, _I64(0), columns, _I64(COLUMNS)) as (column, _):
                address = builder.add(first, builder.mul(column, _I64(ROWS)))
                factors = []
                for half in range(2):
                    factors.append(builder.load(pointer(builder, address, _I64(half), _WORDS, 64), align=1))
                    ahead = builder.inttoptr(builder.add(address, _I64(_AHEAD + 64 * half)), _I8.as_pointer())
                    builder.call(prefetch, [ahead, _I32(0), _I32(3), _I32(1)])
                for token_sums, offset in zip(sums, token_offsets, strict=True):
                    four = builder.load(pointer(builder, inputs, builder.add(offset, column), _I32, 1), align=1)
                    values = _broadcast(builder, four, _WORDS)
                    for total, factor in zip(token_sums, factors, strict=True):
                        builder.store(builder.call(add_products, [builder.load(total), values, factor]), total)
            for half in range(2):
                output = builder.add(row, _I64(16 * half))
                scale, correction, bias = (
                    builder.load(pointer(builder, base, output, kind, 4), align=4)
                    for base, kind in ((scales, _FLOATS), (corrections, _WORDS), (biases, _FLOATS))
                )
                for number in range(tokens):
                    token_index = builder.add(token, _I64(number))
                    token_scale = builder.load(pointer(builder, token_scales, token_index, _F32, 4), align=4)
                    exact = builder.sitofp(builder.sub(builder.load(sums[number][half]), correction), _FLOATS)
                    product = builder.fmul(exact, builder.fmul(scale, _broadcast(builder, token_scale, _FLOATS)))
                    out = builder.fadd(product, bias)
                    index = builder.add(builder.mul(token_index, rows), output)
                    with builder.if_else(builder.trunc(is_bf16, ir.IntType(1))) as (in_bf16, in_float32):
                        with in_bf16:
                            builder.store(_as_bf16(builder, out), pointer(builder, outputs, index, _HALVES, 2), align=2)
                        with in_float32:
                            builder.store(out, pointer(builder, outputs, index, _FLOATS, 4), align=4)
            return _context.get_dummy_value()

        return types.void(types.CPointer(types.int64), types.int64, types.int64), code

    return tile


@partial(compiled, signature=types.void(*(types.voidptr,) * 3, types.int64, types.int64))
def _round_tokens(halves, rounded, scales, tokens, columns):  # type: ignore[no-untyped-def]
    """Quantize each bf16 token to uint8 with a scale, its largest magnitude to 127; the arrays are addresses."""
    for token in range(tokens):
        values = carray(halves, (tokens, columns), np.uint16)[token]
        integers = carray(rounded, (tokens, columns), np.uint8)[token]
        max_bits = np.uint16(0)
        for column in range(columns):
            max_bits = max(max_bits, np.uint16(values[column] & np.uint16(0x7FFF)))  # bits compare as magnitudes
        largest = max(np.uint32(np.uint32(max_bits) << 16).view(np.float32), np.float32(1e-10))
        carray(scales, tokens, np.float32)[token] = largest / np.float32(127)
        factor = np.float32(127) / largest
        for column in range(columns):
            value = np.uint32(np.uint32(values[column]) << 16).view(np.float32)
            integers[column] = np.uint8(np.int32(np.rint(value * factor)) + np.int32(_ZERO_POINT))


@njit(nogil=True, error_model="numpy")
def _panel(work, row, token):  # type: ignore[no-untyped-def]
    """Multiply ROWS rows by the remaining tokens: the base case, without any."""


def _panel_with(size: int, panel: Any) -> Any:
    """Code that multiplies ROWS rows by `size` tokens at a time, and by the remaining ones with `panel`."""
    tile = _tile(size)

    @njit(nogil=True, error_model="numpy")
    def larger_panel(work, row, token):  # type: ignore[no-untyped-def]
        while work[8] - token >= size:
            tile(work, row, token)
            token += size
        panel(work, row, token)

    return larger_panel


for _size in (1, 2, 3, 4, 6, 8, _MAX_TOKENS):
    _panel = _panel_with(_size, _panel)


def _share(work):  # type: ignore[no-untyped-def]
    """Multiply the calling thread's share of the panels."""
    panels, index, count = work[7] // ROWS, np.int64(thread_index()), np.int64(thread_count())
    for panel in range(panels * index // count, panels * (index + 1) // count):
        _panel(work, panel * ROWS, 0)


@cache
def _compiled_share() -> Any:
    """Compile `_share` for the first matrix: without the instruction, LLVM would end the process at import."""
    return compiled(_share)


def fits(outputs: int, inputs: int, activations: torch.dtype, out: torch.dtype) -> bool:
    """Whether the kernel supports a matrix of this shape, with these dtypes of activations and outputs."""
    shape_fits = outputs % ROWS == 0 and inputs % 16 == 0
    return shape_fits and activations == torch.bfloat16 and out in (torch.bfloat16, torch.float32)


def multiplication(
    integers: torch.Tensor, scale: torch.Tensor, out: torch.dtype
) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """A function of bf16 tokens, shape (tokens, inputs), and a bias or None; it returns the shape (tokens, outputs).

    Args:
        integers: Int8 weights, shape (outputs, inputs), for which `fits` is true.
        scale: Per output, shape (outputs,).
        out: Dtype of the result.
    """
    rows, columns = integers.shape
    # The kernel's layout: COLUMNS columns of each of ROWS rows at a time.
    weights = integers.view(rows // ROWS, ROWS, columns // COLUMNS, COLUMNS).transpose(1, 2).contiguous()
    # numpy sums bytes seven times as fast as torch, which saves a second per billion weights.
    corrections = torch.from_numpy(integers.numpy().sum(axis=1, dtype=np.int32)) * _ZERO_POINT
    scales = scale.float().contiguous()
    zeros = torch.zeros(rows, dtype=torch.float32)
    tensors = weights, scales, corrections
    weights_address, scales_address, corrections_address = (tensor.data_ptr() for tensor in tensors)
    is_bf16, share = out == torch.bfloat16, _compiled_share()

    def multiply(tokens: torch.Tensor, bias: torch.Tensor | None, _: object = tensors) -> torch.Tensor:
        tokens = tokens.contiguous()
        biases = zeros if bias is None else bias.float()
        count = tokens.shape[0]
        # One buffer for all scales, then all integers: a pass multiplies a hundred times, so microseconds count.
        rounded = torch.empty(count * (4 + columns), dtype=torch.uint8)
        result = torch.empty((count, rows), dtype=out)
        address = rounded.data_ptr()
        sources = weights_address, address + 4 * count, address, scales_address, corrections_address, biases.data_ptr()
        _round_tokens.ctypes(tokens.data_ptr(), address + 4 * count, address, count, columns)
        work = _Work(*sources, result.data_ptr(), rows, count, columns, is_bf16)
        parallel_for(share, work)
        return result

    return multiply
