"""Multiplying by 8-bit integers on a CPU without instructions for int8 arithmetic, as fast as memory gives them.

What a token's outputs are does not depend on how many tokens are multiplied with it, bit for bit: every size of batch
adds the same products in the same order.
"""

import ctypes
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from lookahead_agent.cpu.jit import compiled, parallel_for, pointer, thread, threads

LANES = 8  # columns that are multiplied at once; a matrix has a multiple of these
_PACK = 6  # rows that lie beside each other in memory, LANES columns at a time, so that it is read in order
_ROWS = {1: 6, 2: 6, 3: 3, 4: 3}  # of a tile, by its tokens: as many sums as there are registers; they divide _PACK
_BLOCK_ROWS, _BLOCK_COLUMNS = 8 * _PACK, 2048  # multiplied by all tokens before the next: it stays in a core's cache

_FIELDS = 7  # of what one multiplication works on: addresses and sizes
_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_INTEGERS, _FLOATS = ir.VectorType(ir.IntType(8), LANES), ir.VectorType(_F32, LANES)


def _sum(builder: Any, vector: Any) -> Any:
    """The sum of a vector's lanes, halves at a time."""
    width = LANES
    while width > 1:
        width //= 2
        kind = ir.VectorType(_I32, width)
        low, high = ir.Constant(kind, list(range(width))), ir.Constant(kind, list(range(width, 2 * width)))
        nothing = ir.Constant(vector.type, ir.Undefined)
        vector = builder.fadd(
            builder.shuffle_vector(vector, nothing, low), builder.shuffle_vector(vector, nothing, high)
        )
    return builder.extract_element(vector, _I32(0))


def _tile(rows: int, tokens: int) -> Any:
    """Code that multiplies rows of a pack by some tokens in some columns, and keeps what is summed in registers."""

    @intrinsic
    def tile(_, work, pack, row, token, first, width):  # type: ignore[no-untyped-def]
        def code(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
            work, pack, row, token, first, width = given
            fields = [builder.load(builder.gep(work, [_I64(field)])) for field in range(_FIELDS)]
            weights, scales, inputs, outputs, all_rows, columns, _ = fields
            multiply_add = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), f"llvm.fma.v{LANES}f32"
            )
            in_pack = builder.mul(_I64(LANES), builder.sub(row, pack))
            begin = builder.add(builder.add(weights, builder.mul(pack, columns)), in_pack)
            begins = [builder.add(begin, _I64(LANES * each)) for each in range(rows)]
            of_token = [builder.add(token, _I64(each)) for each in range(tokens)]
            values_begin = [builder.mul(each, columns) for each in of_token]
            nothing = ir.Constant(_FLOATS, [0.0] * LANES)
            sums = [[cgutils.alloca_once_value(builder, nothing) for _ in range(tokens)] for _ in range(rows)]
            with cgutils.for_range_slice(builder, first, builder.add(first, width), _I64(LANES)) as (column, _):
                places = [pointer(builder, place, column, _INTEGERS, _PACK) for place in begins]
                factors = [builder.sitofp(builder.load(place, align=1), _FLOATS) for place in places]
                for each in range(tokens):
                    index = builder.add(values_begin[each], column)
                    values = builder.load(pointer(builder, inputs, index, _FLOATS, 4), align=4)
                    for factor, known in zip(factors, (of_row[each] for of_row in sums), strict=True):
                        builder.store(builder.call(multiply_add, [factor, values, builder.load(known)]), known)
            begins_anew = builder.icmp_signed("==", first, _I64(0))
            for each, of_row in enumerate(sums):
                output = builder.add(row, _I64(each))
                # The last pack may have rows that the matrix does not.
                with builder.if_then(builder.icmp_signed("<", output, all_rows)):
                    scale = builder.load(pointer(builder, scales, output, _F32, 4), align=4)
                    for known, place in zip(of_row, of_token, strict=True):
                        total = builder.fmul(_sum(builder, builder.load(known)), scale)
                        index = builder.add(builder.mul(place, all_rows), output)
                        out = pointer(builder, outputs, index, _F32, 4)
                        before = builder.select(begins_anew, _F32(0.0), builder.load(out, align=4))
                        builder.store(builder.fadd(before, total), out, align=4)
            return _context.get_dummy_value()

        return types.void(types.CPointer(types.int64), *(types.int64,) * 5), code

    return tile


@njit(nogil=True, error_model="numpy")
def _packs(work, begin, end, token, column, width):  # type: ignore[no-untyped-def]
    """Packs of rows by the tokens that are left: none."""


def _packs_with(rows: int, tokens: int, packs: Any) -> Any:
    """Code that multiplies packs of rows by so many tokens at a time, and by what is left of them as `packs` does."""
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
    """A thread's share of a multiplication: some of the packs."""
    packs, mine, shares = (work[4] + _PACK - 1) // _PACK, np.int64(thread()), np.int64(threads())
    end = packs * (mine + 1) // shares * _PACK
    for begin in range(packs * mine // shares * _PACK, end, _BLOCK_ROWS):
        for column in range(0, work[5], _BLOCK_COLUMNS):
            _packs(work, begin, min(begin + _BLOCK_ROWS, end), 0, column, min(_BLOCK_COLUMNS, work[5] - column))


def packed(integers: torch.Tensor) -> torch.Tensor:
    """Weights, int8, shape (outputs, inputs), as `multiply` takes them: (packs, inputs / LANES, rows of a pack, LANES).

    Raises ValueError if the inputs are no multiple of LANES.
    """
    outputs, inputs = integers.shape
    if inputs % LANES:
        raise ValueError(f"a matrix of {inputs} inputs has no whole number of {LANES}")
    rows = torch.nn.functional.pad(integers, (0, 0, 0, -outputs % _PACK))
    return rows.view(-1, _PACK, inputs // LANES, LANES).transpose(1, 2).contiguous()


def multiply(tokens: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply tokens by a matrix of integers; the result is float32, shape (tokens, outputs).

    Args:
        tokens: float32, shape (tokens, inputs).
        weights: As of `packed`.
        scale: Of each output: float32, shape (outputs,).
    """
    tokens = tokens.contiguous()
    out = torch.empty(tokens.shape[0], scale.shape[0])
    places = [each.data_ptr() for each in (weights, scale, tokens, out)]
    work = (ctypes.c_int64 * _FIELDS)(*places, scale.shape[0], tokens.shape[1], tokens.shape[0])
    parallel_for(_share, work)
    return out
