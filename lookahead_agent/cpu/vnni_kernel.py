"""Multiplying int8 by int8 on a CPU with AVX-512 VNNI, as fast as memory gives the weights.

vLLM's kernel for it (oneDNN) takes a fifth to a half longer for the few tokens of a pass that decodes. What
is summed are integers, so a token's outputs do not depend on how many tokens are multiplied with it.
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

from lookahead_agent.cpu.jit import compiled, parallel_for, pointer, thread, threads

ROWS = 32  # rows that lie beside each other in memory, COLUMNS columns of each at a time: two vectors of 16 sums
COLUMNS = 4  # columns whose products one instruction adds to a sum
_MOST_TOKENS = 12  # in a tile: with two vectors of weights, as many sums as there are registers for
_AHEAD = 4096  # bytes of weights by which memory is asked ahead
_SIGN = 128  # added to what is multiplied with the weights, for the instruction wants it without a sign

_FIELDS = 11
_Work = ctypes.c_int64 * _FIELDS  # what one multiplication works on: addresses and sizes

_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_WORDS, _FLOATS, _HALVES = ir.VectorType(_I32, 16), ir.VectorType(_F32, 16), ir.VectorType(_I16, 16)


def is_supported() -> bool:
    """Whether this processor has the instruction, and numba writes for this processor."""
    if any(os.environ.get(name) for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")):
        return False
    found = llvmlite.binding.get_host_cpu_features()
    # With AMX, vLLM has kernels that multiply a prompt several times as fast.
    return found.get("avx512vnni", False) and not found.get("amx-int8", False)


def _everywhere(builder: Any, value: Any, kind: Any) -> Any:
    """A vector that has a value in each lane."""
    nothing = ir.Constant(kind, ir.Undefined)
    lanes = ir.Constant(_WORDS, [0] * 16)
    return builder.shuffle_vector(builder.insert_element(nothing, value, _I32(0)), nothing, lanes)


def _as_bf16(builder: Any, floats: Any) -> Any:
    """Floats rounded to the nearest bf16, to the even one of two."""
    bits = builder.bitcast(floats, _WORDS)
    high = builder.lshr(bits, ir.Constant(_WORDS, [16] * 16))
    odd = builder.and_(high, ir.Constant(_WORDS, [1] * 16))
    rounded = builder.add(builder.add(bits, ir.Constant(_WORDS, [0x7FFF] * 16)), odd)
    return builder.trunc(builder.lshr(rounded, ir.Constant(_WORDS, [16] * 16)), _HALVES)


def _tile(tokens: int) -> Any:
    """Code that multiplies ROWS rows by some tokens, from one on, and keeps what is summed in registers."""

    @intrinsic
    def tile(_, work, row, token):  # type: ignore[no-untyped-def]
        def code(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
            work, row, token = given
            fields = [builder.load(builder.gep(work, [_I64(field)])) for field in range(_FIELDS)]
            weights, inputs, token_scales, scales, excess, biases, outputs, rows, _, columns, halves = fields
            add_products = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(_WORDS, [_WORDS] * 3), "llvm.x86.avx512.vpdpbusd.512"
            )
            prefetch = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32]), "llvm.prefetch.p0"
            )
            nothing = ir.Constant(_WORDS, [0] * 16)
            sums = [[cgutils.alloca_once_value(builder, nothing) for _ in range(2)] for _ in range(tokens)]
            first = builder.add(weights, builder.mul(row, columns))
            begins = [builder.mul(builder.add(token, _I64(each)), columns) for each in range(tokens)]
            with cgutils.for_range_slice(builder, _I64(0), columns, _I64(COLUMNS)) as (column, _):
                place = builder.add(first, builder.mul(column, _I64(ROWS)))
                factors = []
                for half in range(2):
                    factors.append(builder.load(pointer(builder, place, _I64(half), _WORDS, 64), align=1))
                    ahead = builder.inttoptr(builder.add(place, _I64(_AHEAD + 64 * half)), _I8.as_pointer())
                    builder.call(prefetch, [ahead, _I32(0), _I32(3), _I32(1)])
                for of_token, begin in zip(sums, begins, strict=True):
                    four = builder.load(pointer(builder, inputs, builder.add(begin, column), _I32, 1), align=1)
                    values = _everywhere(builder, four, _WORDS)
                    for known, factor in zip(of_token, factors, strict=True):
                        builder.store(builder.call(add_products, [builder.load(known), values, factor]), known)
            for half in range(2):
                place = builder.add(row, _I64(16 * half))
                scale, too_much, bias = (
                    builder.load(pointer(builder, base, place, kind, 4), align=4)
                    for base, kind in ((scales, _FLOATS), (excess, _WORDS), (biases, _FLOATS))
                )
                for each in range(tokens):
                    of_token = builder.add(token, _I64(each))
                    token_scale = builder.load(pointer(builder, token_scales, of_token, _F32, 4), align=4)
                    exact = builder.sitofp(builder.sub(builder.load(sums[each][half]), too_much), _FLOATS)
                    product = builder.fmul(exact, builder.fmul(scale, _everywhere(builder, token_scale, _FLOATS)))
                    out = builder.fadd(product, bias)
                    index = builder.add(builder.mul(of_token, rows), place)
                    with builder.if_else(builder.trunc(halves, ir.IntType(1))) as (in_bf16, in_float32):
                        with in_bf16:
                            builder.store(_as_bf16(builder, out), pointer(builder, outputs, index, _HALVES, 2), align=2)
                        with in_float32:
                            builder.store(out, pointer(builder, outputs, index, _FLOATS, 4), align=4)
            return _context.get_dummy_value()

        return types.void(types.CPointer(types.int64), types.int64, types.int64), code

    return tile


@partial(compiled, signature=types.void(*(types.voidptr,) * 3, types.int64, types.int64))
def _round_tokens(halves, rounded, scales, tokens, columns):  # type: ignore[no-untyped-def]
    """Each token in bf16 as integers with a scale, the largest being 127 from zero; by addresses and sizes."""
    for token in range(tokens):
        values = carray(halves, (tokens, columns), np.uint16)[token]
        integers = carray(rounded, (tokens, columns), np.uint8)[token]
        most = np.uint16(0)
        for column in range(columns):
            most = max(most, np.uint16(values[column] & np.uint16(0x7FFF)))  # as numbers without a sign are ordered
        largest = max(np.uint32(np.uint32(most) << 16).view(np.float32), np.float32(1e-10))
        carray(scales, tokens, np.float32)[token] = largest / np.float32(127)
        factor = np.float32(127) / largest
        for column in range(columns):
            value = np.uint32(np.uint32(values[column]) << 16).view(np.float32)
            integers[column] = np.uint8(np.int32(np.rint(value * factor)) + np.int32(_SIGN))


@njit(nogil=True, error_model="numpy")
def _panel(work, row, token):  # type: ignore[no-untyped-def]
    """ROWS rows by the tokens that are left: none."""


def _panel_with(size: int, panel: Any) -> Any:
    """Code that multiplies ROWS rows by so many tokens at a time, and by what is left of them as `panel` does."""
    tile = _tile(size)

    @njit(nogil=True, error_model="numpy")
    def larger_panel(work, row, token):  # type: ignore[no-untyped-def]
        while work[8] - token >= size:
            tile(work, row, token)
            token += size
        panel(work, row, token)

    return larger_panel


for _size in (1, 2, 3, 4, 6, 8, _MOST_TOKENS):
    _panel = _panel_with(_size, _panel)


def _share(work):  # type: ignore[no-untyped-def]
    """A thread's share of a multiplication: some of the panels."""
    panels, mine, shares = work[7] // ROWS, np.int64(thread()), np.int64(threads())
    for panel in range(panels * mine // shares, panels * (mine + 1) // shares):
        _panel(work, panel * ROWS, 0)


@cache
def _compiled_share() -> Any:
    """Its machine code, made for the first matrix: on a processor without the instruction LLVM ends the process."""
    return compiled(_share)


def fits(outputs: int, inputs: int, activations: torch.dtype, out: torch.dtype) -> bool:
    """Whether a matrix of this shape can be multiplied, with such activations and outputs."""
    shape = outputs % ROWS == 0 and inputs % 16 == 0
    return shape and activations == torch.bfloat16 and out in (torch.bfloat16, torch.float32)


def multiplication(
    integers: torch.Tensor, scale: torch.Tensor, out: torch.dtype
) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """A function of bf16 tokens, shape (tokens, inputs), and a bias or None; it gives the shape (tokens, outputs).

    Args:
        integers: The weights, int8, shape (outputs, inputs), which `fits`.
        scale: Of each output, shape (outputs,).
        out: Dtype of what comes out.
    """
    rows, columns = integers.shape
    # As the kernel reads them: COLUMNS of each of ROWS rows at a time.
    weights = integers.view(rows // ROWS, ROWS, columns // COLUMNS, COLUMNS).transpose(1, 2).contiguous()
    # numpy adds bytes seven times as fast: a second less for each billion of weights.
    excess = torch.from_numpy(integers.numpy().sum(axis=1, dtype=np.int32)) * _SIGN
    scales = scale.float().contiguous()
    nothing = torch.zeros(rows, dtype=torch.float32)
    kept = weights, scales, excess
    of_weights, of_scales, of_excess = (each.data_ptr() for each in kept)
    halves, share = out == torch.bfloat16, _compiled_share()

    def multiply(tokens: torch.Tensor, bias: torch.Tensor | None, _: object = kept) -> torch.Tensor:
        tokens = tokens.contiguous()
        biases = nothing if bias is None else bias.float()
        count = tokens.shape[0]
        # Of each token its scale, then all their integers: called a hundred times in a pass, this counts microseconds.
        rounded = torch.empty(count * (4 + columns), dtype=torch.uint8)
        result = torch.empty((count, rows), dtype=out)
        place = rounded.data_ptr()
        given = of_weights, place + 4 * count, place, of_scales, of_excess, biases.data_ptr()
        _round_tokens.ctypes(tokens.data_ptr(), place + 4 * count, place, count, columns)
        work = _Work(*given, result.data_ptr(), rows, count, columns, halves)
        parallel_for(share, work)
        return result

    return multiply
