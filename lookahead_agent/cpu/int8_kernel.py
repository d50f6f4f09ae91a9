"""Multiplies int8 by int8 on x86, as fast as memory delivers the weights: with AVX-512 VNNI, AVX-VNNI or AVX2.

Layout and loop are the same for all three; only the instructions that add four products to a sum differ. The sums are
exact integers, so a token's outputs depend neither on the batch size nor on the processor.
"""

import ctypes
import os
import platform
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from lookahead_agent.cpu import INSTRUCTIONS
from lookahead_agent.cpu.jit import compile_function, parallel_for, pointer, thread_count, thread_index, wait_for_team
from lookahead_agent.cpu.packing import COLUMNS, ROWS

_AHEAD = 4096  # bytes of weights between a load and its prefetch
_TOKEN_BLOCK = 128  # tokens that stay in a core's cache while all rows are multiplied

_FIELDS = 14
_Work = ctypes.c_int64 * _FIELDS  # a work array: the addresses and sizes of one multiplication

_I1, _I8, _I16, _I32, _I64, _F32 = (*(ir.IntType(bits) for bits in (1, 8, 16, 32, 64)), ir.FloatType())


def _call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call one of LLVM's intrinsics."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _vpdpbusd(builder: Any, sums: Any, tokens: Any, weights: Any) -> Any:
    width = 32 * sums.type.count
    return _call(builder, f"llvm.x86.avx512.vpdpbusd.{width}", sums.type, sums, tokens, weights)


def _avx2(builder: Any, sums: Any, tokens: Any, weights: Any) -> Any:
    """Two products of |weight| and ±token fit 16 bits, as tokens are in [-127, 127], so nothing saturates."""
    bytes_, words = ir.VectorType(_I8, 32), ir.VectorType(_I16, 16)
    tokens, weights = builder.bitcast(tokens, bytes_), builder.bitcast(weights, bytes_)
    magnitudes = _call(builder, "llvm.abs.v32i8", bytes_, weights, _I1(0))
    signed = _call(builder, "llvm.x86.avx2.psign.b", bytes_, tokens, weights)
    pairs = _call(builder, "llvm.x86.avx2.pmadd.ub.sw", words, magnitudes, signed)
    ones = ir.Constant(words, [1] * 16)
    return builder.add(sums, _call(builder, "llvm.x86.avx2.pmadd.wd", sums.type, pairs, ones))


@dataclass(frozen=True)
class InstructionSet:
    """How a processor adds products of int8 to sums."""

    feature: str  # LLVM's name of the processor's feature
    lanes: int  # sums of a vector
    add_products: Callable[..., Any]  # adds COLUMNS products to each sum of a vector
    zero_point: int  # added to the quantized tokens: VNNI takes them as unsigned
    # Tokens of a tile, and its vectors of weights, by the tokens that are left: as many sums as fit the registers
    tiles: Mapping[int, tuple[int, int]]


_PAIRS = {tokens: (tokens, 2) for tokens in (1, 2, 3, 4, 6, 8, 12)}
# Whole panels are read from memory once; few tokens wait for memory, many for the sums.
_FOURS = {1: (1, 4), 2: (2, 4), 3: (3, 4), 16: (4, 2)}
INSTRUCTION_SETS: Mapping[str, InstructionSet] = {
    "avx512_vnni": InstructionSet("avx512vnni", 16, _vpdpbusd, 128, _PAIRS),
    "avx_vnni": InstructionSet("avxvnni", 8, _vpdpbusd, 128, _FOURS),
    "avx2": InstructionSet("avx2", 8, _avx2, 0, _FOURS),
}
"""By name, fastest first."""


def available_instruction_sets() -> list[str]:
    """The processor's instruction sets, fastest first."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    features = _processor_features()
    return [name for name, each in INSTRUCTION_SETS.items() if each.feature in features]


def _processor_features() -> set[str]:
    """LLVM's names of the features of the processor for which numba compiles."""
    name, features = (os.environ.get(f"NUMBA_CPU_{part}", "") for part in ("NAME", "FEATURES"))
    if not name and not features:
        return {name for name, present in llvmlite.binding.get_host_cpu_features().items() if present}
    return {name for name in features.replace("+", "").split(",") if name}


@cache
def instruction_set() -> str | None:
    """The fastest of the processor's instruction sets, or the one that the environment names; None: vLLM's kernel.

    Raises ValueError if the processor does not have the one that is named.
    """
    available = available_instruction_sets()
    if named := os.environ.get(INSTRUCTIONS):
        if named not in available:
            raise ValueError(f"{INSTRUCTIONS}={named!r}: this processor has {', '.join(available) or 'none'}")
        return named
    # With AMX, vLLM's kernels multiply a prompt several times as fast.
    return available[0] if available and "amx-int8" not in _processor_features() else None


def _broadcast(builder: Any, value: Any, lanes: int) -> Any:
    """Broadcast a value to every lane of a vector."""
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
    return builder.shuffle_vector(builder.insert_element(undefined, value, _I32(0)), undefined, first)


def _as_bf16(builder: Any, floats: Any) -> Any:
    """Round floats to the nearest bf16, ties to even."""
    lanes = floats.type.count
    words = ir.VectorType(_I32, lanes)
    bits = builder.bitcast(floats, words)
    high = builder.lshr(bits, ir.Constant(words, [16] * lanes))
    odd = builder.and_(high, ir.Constant(words, [1] * lanes))
    rounded = builder.add(builder.add(bits, ir.Constant(words, [0x7FFF] * lanes)), odd)
    return builder.trunc(builder.lshr(rounded, ir.Constant(words, [16] * lanes)), ir.VectorType(_I16, lanes))


def _tile(instructions: InstructionSet, vectors: int, tokens: int) -> Any:
    """Code that multiplies `vectors` vectors of rows by `tokens` consecutive tokens, with the sums in registers."""
    lanes = instructions.lanes
    words, floats, halves = (ir.VectorType(kind, lanes) for kind in (_I32, _F32, _I16))

    @intrinsic
    def tile(_, work, row, token):  # type: ignore[no-untyped-def]
        def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            work, row, token = arguments
            fields = [builder.load(builder.gep(work, [_I64(field)])) for field in range(11)]
            weights, inputs, token_scales, scales, corrections, biases, outputs, rows, _, columns, is_bf16 = fields
            zeros = ir.Constant(words, [0] * lanes)
            sums = [[cgutils.alloca_once_value(builder, zeros) for _ in range(vectors)] for _ in range(tokens)]
            row_in_panel = builder.and_(row, _I64(ROWS - 1))
            panel = builder.mul(builder.sub(row, row_in_panel), columns)
            first = builder.add(builder.add(weights, panel), builder.mul(row_in_panel, _I64(COLUMNS)))
            token_offsets = [builder.mul(builder.add(token, _I64(index)), columns) for index in range(tokens)]
            with cgutils.for_range_slice(builder, _I64(0), columns, _I64(COLUMNS)) as (column, _):
                address = builder.add(first, builder.mul(column, _I64(ROWS)))
                factors = []
                for vector in range(vectors):
                    source = pointer(builder, address, _I64(vector), words, 4 * lanes)
                    factors.append(builder.load(source, align=1))
                    if 4 * lanes * vector % 64 == 0:  # a cache line
                        ahead = builder.add(address, _I64(_AHEAD + 4 * lanes * vector))
                        ahead = builder.inttoptr(ahead, _I8.as_pointer())
                        _call(builder, "llvm.prefetch.p0", ir.VoidType(), ahead, _I32(0), _I32(3), _I32(1))
                for token_sums, offset in zip(sums, token_offsets, strict=True):
                    four = builder.load(pointer(builder, inputs, builder.add(offset, column), _I32, 1), align=1)
                    values = _broadcast(builder, four, lanes)
                    for total, factor in zip(token_sums, factors, strict=True):
                        added = instructions.add_products(builder, builder.load(total), values, factor)
                        builder.store(added, total)
            for vector in range(vectors):
                output = builder.add(row, _I64(lanes * vector))
                scale, correction, bias = (
                    builder.load(pointer(builder, base, output, kind, 4), align=4)
                    for base, kind in ((scales, floats), (corrections, words), (biases, floats))
                )
                for number in range(tokens):
                    token_index = builder.add(token, _I64(number))
                    token_scale = builder.load(pointer(builder, token_scales, token_index, _F32, 4), align=4)
                    exact = builder.sitofp(builder.sub(builder.load(sums[number][vector]), correction), floats)
                    product = builder.fmul(exact, builder.fmul(scale, _broadcast(builder, token_scale, lanes)))
                    out = builder.fadd(product, bias)
                    index = builder.add(builder.mul(token_index, rows), output)
                    with builder.if_else(builder.trunc(is_bf16, _I1)) as (in_bf16, in_float32):
                        with in_bf16:
                            builder.store(_as_bf16(builder, out), pointer(builder, outputs, index, halves, 2), align=2)
                        with in_float32:
                            builder.store(out, pointer(builder, outputs, index, floats, 4), align=4)
            return _context.get_dummy_value()

        return types.void(types.CPointer(types.int64), types.int64, types.int64), code

    return tile


@intrinsic
def _at(_, address):  # type: ignore[no-untyped-def]
    """The pointer to an address."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _I8.as_pointer())

    return types.voidptr(types.int64), code


@njit(nogil=True, error_model="numpy")
def _scale_of(largest, scales, token):  # type: ignore[no-untyped-def]
    """Store a token's scale, and return the factor that takes its largest magnitude to 127."""
    largest = max(largest, np.float32(1e-10))
    carray(_at(scales), token + 1, np.float32)[token] = largest / np.float32(127)
    return np.float32(127) / largest


def _token_rounding(zero_point: int) -> Any:
    """Code that quantizes a token, bf16 or float32, to bytes and a scale."""

    @njit(nogil=True, error_model="numpy")
    def round_token(work, token):  # type: ignore[no-untyped-def]
        padded, columns = work[9], work[13]
        integers = carray(_at(work[1] + token * padded), padded, np.uint8)
        if work[12]:
            halves = carray(_at(work[11] + 2 * token * columns), columns, np.uint16)
            max_half = np.uint16(0)
            for column in range(columns):
                max_half = max(max_half, np.uint16(halves[column] & np.uint16(0x7FFF)))  # bits compare as magnitudes
            factor = _scale_of(np.uint32(np.uint32(max_half) << 16).view(np.float32), work[2], token)
            for column in range(columns):
                value = np.uint32(np.uint32(halves[column]) << 16).view(np.float32)
                integers[column] = np.uint8(np.int32(np.rint(value * factor)) + np.int32(zero_point))
        else:
            floats = carray(_at(work[11] + 4 * token * columns), columns, np.float32)
            bits = carray(_at(work[11] + 4 * token * columns), columns, np.uint32)
            max_bits = np.uint32(0)
            for column in range(columns):
                max_bits = max(max_bits, np.uint32(bits[column] & np.uint32(0x7FFFFFFF)))
            factor = _scale_of(np.uint32(max_bits).view(np.float32), work[2], token)
            for column in range(columns):
                integers[column] = np.uint8(np.int32(np.rint(floats[column] * factor)) + np.int32(zero_point))
        for column in range(columns, padded):
            integers[column] = np.uint8(zero_point)

    return round_token


@njit(nogil=True, error_model="numpy")
def _no_panel(work, row, token, end):  # type: ignore[no-untyped-def]
    """Multiply ROWS rows by the remaining tokens: the base case, without any."""


def _panel(tile: Any, least: int, size: int, rows: int, panel: Any) -> Any:
    """Code that multiplies ROWS rows by `size` tokens at a time while `least` are left, and the rest with `panel`."""

    @njit(nogil=True, error_model="numpy")
    def larger_panel(work, row, token, end):  # type: ignore[no-untyped-def]
        while end - token >= least:
            for part in range(row, row + ROWS, rows):
                tile(work, part, token)
            token += size
        panel(work, row, token, end)

    return larger_panel


_round_token: Any = None  # these two are set for each instruction set, by `compile_share`
_multiply_panel: Any = None


def _share(work):  # type: ignore[no-untyped-def]
    """Quantize the calling thread's share of the tokens, then multiply its share of the panels."""
    index, count = np.int64(thread_index()), np.int64(thread_count())
    panels, tokens = work[7] // ROWS, work[8]
    for token in range(tokens * index // count, tokens * (index + 1) // count):
        _round_token(work, token)
    wait_for_team()
    for block in range(0, tokens, _TOKEN_BLOCK):
        end = min(block + _TOKEN_BLOCK, tokens)
        for panel in range(panels * index // count, panels * (index + 1) // count):
            _multiply_panel(work, panel * ROWS, block, end)


@cache
def compile_share(name: str) -> Any:
    """Compile a thread's share of the work for an instruction set, without which LLVM would end the process."""
    instructions = INSTRUCTION_SETS[name]
    panel = _no_panel
    for least, (size, vectors) in instructions.tiles.items():
        panel = _panel(_tile(instructions, vectors, size), least, size, vectors * instructions.lanes, panel)
    # The variables are globals: numba would cache a function with variables of a closure for this process only.
    variables = {**globals(), "_round_token": _token_rounding(instructions.zero_point), "_multiply_panel": panel}
    share = FunctionType(_share.__code__, variables, f"share_{name}")
    share.__qualname__ = share.__name__  # names the cached code
    return compile_function(share)


class _Rounded(threading.local):
    """A thread's memory for quantized tokens, the same for all layers."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def address(self, size: int) -> int:
        """The address of at least `size` bytes, until the next call."""
        if len(self._bytes) < size:
            self._bytes = torch.empty(size, dtype=torch.uint8)
        address: int = self._bytes.data_ptr()
        return address


_rounded = _Rounded()


def multiplication(
    weights: torch.Tensor, scale: torch.Tensor, inputs: int, out: torch.dtype, name: str | None = None
) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """A function of tokens, shape (tokens, inputs), and a bias or None; it returns the shape (tokens, outputs).

    Tokens are bf16 or float32. It quantizes each by its largest magnitude.

    Args:
        weights: Int8 weights, packed.
        scale: Per output, shape (outputs,).
        inputs: Number of inputs.
        out: Dtype of the result: bf16 or float32.
        name: Of the instruction set, by default the fastest.
    """
    name = name or instruction_set()
    assert name is not None
    outputs, share = scale.shape[0], compile_share(name)
    panels, steps = weights.shape[:2]
    rows, columns = panels * ROWS, steps * COLUMNS
    # numpy sums bytes seven times as fast as torch, which saves a second per billion weights.
    corrections = torch.zeros(rows, dtype=torch.int32)
    if zero_point := INSTRUCTION_SETS[name].zero_point:
        sums = weights.numpy().sum(axis=(1, 3), dtype=np.int32).reshape(rows)
        corrections = torch.from_numpy(sums) * zero_point
    padding = (0, rows - outputs)
    scales = torch.nn.functional.pad(scale.float(), padding)
    zeros = torch.zeros(rows, dtype=torch.float32)
    tensors = weights, scales, corrections
    weights_address, scales_address, corrections_address = (tensor.data_ptr() for tensor in tensors)
    is_bf16_out = out == torch.bfloat16
    # A layer has one bias or none, which is padded once.
    last_bias, biases, biases_address = None, zeros, zeros.data_ptr()

    # A pass multiplies hundreds of times, each after weights have taken the place of Python's data in the caches: an
    # operation of torch then costs 10 to 70 microseconds.
    def multiply(tokens: torch.Tensor, bias: torch.Tensor | None, _: object = tensors) -> torch.Tensor:
        nonlocal last_bias, biases, biases_address
        if bias is not last_bias:
            last_bias, biases = bias, zeros if bias is None else torch.nn.functional.pad(bias.float(), padding)
            biases_address = biases.data_ptr()
        tokens = tokens.contiguous()
        count = tokens.shape[0]
        address = _rounded.address(count * (4 + columns))  # all scales, then all integers
        result = tokens.new_empty((count, rows), dtype=out)
        sources = weights_address, address + 4 * count, address, scales_address, corrections_address, biases_address
        sizes = result.data_ptr(), rows, count, columns, is_bf16_out
        is_bf16 = tokens.dtype == torch.bfloat16
        parallel_for(share, _Work(*sources, *sizes, tokens.data_ptr(), is_bf16, inputs))
        return result if outputs == rows else result[:, :outputs].contiguous()

    return multiply
