"""Multiplies by int8 weights on CPUs without int8 instructions, as fast as memory delivers the weights.

A token's outputs do not depend on the batch size, bit for bit: every batch size adds the same products in the same
order.
"""

import ctypes
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from lookahead_agent.cpu.jit import compiled, parallel_for, pointer, thread_count, thread_index

LANES = 8  # columns in a vector; a matrix has a multiple of these
_PACK = 6  # rows that are interleaved in memory, LANES columns at a time, so that reads are sequential
_ROWS = {1: 6, 2: 6, 3: 3, 4: 3}  # of a tile, by its tokens: as many sums as fit the registers; they divide _PACK
_BLOCK_ROWS, _BLOCK_COLUMNS = 8 * _PACK, 2048  # of a block that stays in a core's cache for all tokens

_FIELDS = 7  # of a work array: the addresses and sizes of one multiplication
_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_INTEGERS, _FLOATS = ir.VectorType(ir.IntType(8), LANES), ir.VectorType(_F32, LANES)


def _sum(builder: Any, vector: Any) -> Any:
    """Sum a vector's lanes by halves."""
    width = LANES
    while width > 1:
        width //= 2
        kind = ir.VectorType(_I32, width)
        low, high = ir.Constant(kind, list(range(width))), ir.Constant(kind, list(range(width, 2 * width)))
        undefined = ir.Constant(vector.type, ir.Undefined)
        vector = builder.fadd(
            builder.shuffle_vector(vector, undefined, low), builder.shuffle_vector(vector, undefined, high)
        )
    return builder.extract_element(vector, _I32(0))


def _tile(rows: int, tokens: int) -> Any:
    """Code that multiplies rows of a pack by tokens over a range of columns, with the sums in registers."""

    @intrinsic
    def tile(_, work, pack, row, token, first, width):  # type: ignore[no-untyped-def]
        def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            work, pack, row, token, first, width = arguments
            fields = [builder.load(builder.gep(work, [_I64(field)])) for field in range(_FIELDS)]
            weights, scales, inputs, outputs, all_rows, columns, _ = fields
            multiply_add = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), f"llvm.fma.v{LANES}f32"
            )
            in_pack = builder.mul(_I64(LANES), builder.sub(row, pack))
            begin = builder.add(builder.add(weights, builder.mul(pack, columns)), in_pack)
            row_addresses = [builder.add(begin, _I64(LANES * index)) for index in range(rows)]
            token_indices = [builder.add(token, _I64(index)) for index in range(tokens)]
            token_offsets = [builder.mul(index, columns) for index in token_indices]
            zeros = ir.Constant(_FLOATS, [0.0] * LANES)
            sums = [[cgutils.alloca_once_value(builder, zeros) for _ in range(tokens)] for _ in range(rows)]
            with cgutils.for_range_slice(builder, first, builder.add(first, width), _I64(LANES)) as (column, _):
                pointers = [pointer(builder, address, column, _INTEGERS, _PACK) for address in row_addresses]
                factors = [builder.sitofp(builder.load(source, align=1), _FLOATS) for source in pointers]
                for number in range(tokens):
                    index = builder.add(token_offsets[number], column)
                    values = builder.load(pointer(builder, inputs, index, _FLOATS, 4), align=4)
                    for factor, total in zip(factors, (row_sums[number] for row_sums in sums), strict=True):
                        builder.store(builder.call(multiply_add, [factor, values, builder.load(total)]), total)
            is_first_block = builder.icmp_signed("==", first, _I64(0))
            for number, row_sums in enumerate(sums):
                output = builder.add(row, _I64(number))
                # The last pack may be padded with rows that the matrix does not have.
                with builder.if_then(builder.icmp_signed("<", output, all_rows)):
                    scale = builder.load(pointer(builder, scales, output, _F32, 4), align=4)
                    for total, token_index in zip(row_sums, token_indices, strict=True):
                        product = builder.fmul(_sum(builder, builder.load(total)), scale)
                        index = builder.add(builder.mul(token_index, all_rows), output)
                        out = pointer(builder, outputs, index, _F32, 4)
                        previous = builder.select(is_first_block, _F32(0.0), builder.load(out, align=4))
                        builder.store(builder.fadd(previous, product), out, align=4)
            return _context.get_dummy_value()

        return types.void(types.CPointer(types.int64), *(types.int64,) * 5), code

    return tile


@njit(nogil=True, error_model="numpy")
def _packs(work, begin, end, token, column, width):  # type: ignore[no-untyped-def]
    """Multiply packs of rows by the remaining tokens: the base case, without any."""


def _packs_with(rows: int, tokens: int, packs: Any) -> Any:
    """Code that multiplies packs of rows by `tokens` tokens at a time, and by the remaining ones with `packs`."""
    tile = _tile(rows, tokens)

    @njit(nogil=True, error_model="numpy")
    def more_packs(work, begin, end, token, column, width):  # type: ignore[no-untyped-def]
        while work[6] - token >= tokens:
            for pack in range(begin, end, _PACK):
                for row in range(pack, pack + _PACK, rows):
                    tile(work, pack, row, token, column, width)
            token += tokens
        packs(work, begin, end, token, column, width)

    return more_packs


for _tokens, _rows in _ROWS.items():
    _packs = _packs_with(_rows, _tokens, _packs)


@compiled
def _share(work):  # type: ignore[no-untyped-def]
    """Multiply the calling thread's share of the packs."""
    packs, index, count = (work[4] + _PACK - 1) // _PACK, np.int64(thread_index()), np.int64(thread_count())
    end = packs * (index + 1) // count * _PACK
    for begin in range(packs * index // count * _PACK, end, _BLOCK_ROWS):
        for column in range(0, work[5], _BLOCK_COLUMNS):
            _packs(work, begin, min(begin + _BLOCK_ROWS, end), 0, column, min(_BLOCK_COLUMNS, work[5] - column))


def packed(integers: torch.Tensor) -> torch.Tensor:
    """Pack int8 weights, shape (outputs, inputs), for `multiply`: (packs, inputs / LANES, rows of a pack, LANES).

    Raises ValueError if the number of inputs is no multiple of LANES.
    """
    outputs, inputs = integers.shape
    if inputs % LANES:
        raise ValueError(f"a matrix of {inputs} inputs has no whole number of {LANES}")
    rows = torch.nn.functional.pad(integers, (0, 0, 0, -outputs % _PACK))
    return rows.view(-1, _PACK, inputs // LANES, LANES).transpose(1, 2).contiguous()


def multiply(tokens: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply tokens by int8 weights; returns float32, shape (tokens, outputs).

    Args:
        tokens: float32, shape (tokens, inputs).
        weights: Int8, as `packed` returns them.
        scale: Per output: float32, shape (outputs,).
    """
    tokens = tokens.contiguous()
    out = torch.empty(tokens.shape[0], scale.shape[0])
    addresses = [tensor.data_ptr() for tensor in (weights, scale, tokens, out)]
    work = (ctypes.c_int64 * _FIELDS)(*addresses, scale.shape[0], tokens.shape[1], tokens.shape[0])
    parallel_for(_share, work)
    return out
