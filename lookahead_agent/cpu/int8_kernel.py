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
_PACK = 6
"""Rows that lie beside each other in memory, LANES columns at a time, so that it is read from beginning to end."""
_ROWS = {1: 6, 2: 6, 3: 3, 4: 3}
"""Rows of a tile by its tokens: as many sums as a processor has registers for (measured). They divide _PACK."""
_BLOCK_ROWS, _BLOCK_COLUMNS = 8 * _PACK, 2048
"""What is multiplied by all tokens before the next is read: few enough to stay in a core's cache."""

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


def _products(builder: Any, rows: int, tokens: int, weights: Any, inputs: Any, columns: Any, stride: Any) -> Any:
    """The loop over columns: for each row and token the sum of their products, LANES sums each."""
    multiply_add = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), f"llvm.fma.v{LANES}f32"
    )
    token_inputs = [builder.add(inputs, builder.mul(_I64(4 * token), stride)) for token in range(tokens)]
    pack = [builder.add(weights, _I64(LANES * row)) for row in range(rows)]
    nothing = ir.Constant(_FLOATS, [0.0] * LANES)
    sums = [[cgutils.alloca_once_value(builder, nothing) for _ in range(tokens)] for _ in range(rows)]
    with cgutils.for_range_slice(builder, _I64(0), columns, _I64(LANES)) as (column, _):
        places = [pointer(builder, row, column, _INTEGERS, _PACK) for row in pack]
        factors = [builder.sitofp(builder.load(place, align=1), _FLOATS) for place in places]
        for token in range(tokens):
            values = builder.load(pointer(builder, token_inputs[token], column, _FLOATS, 4), align=4)
            for factor, known in zip(factors, (of_row[token] for of_row in sums), strict=True):
                builder.store(builder.call(multiply_add, [factor, values, builder.load(known)]), known)
    return [[builder.load(known) for known in of_row] for of_row in sums]


def _tile(rows: int, tokens: int) -> Any:
    """Code that multiplies some rows by some tokens, and keeps what is summed in registers.

    It takes addresses of the weights, inputs, scales and outputs of the first row and token; how many columns there
    are, and in the whole matrix; outputs of a token; how many rows are left; and whether the columns are the first.
    """

    @intrinsic
    def tile(  # type: ignore[no-untyped-def]
        _, weights, inputs, scales, outputs, columns, stride, token_outputs, left, first
    ):
        def code(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
            weights, inputs, scales, outputs, columns, stride, token_outputs, left, first = given
            products = _products(builder, rows, tokens, weights, inputs, columns, stride)
            for row in range(rows):
                # The last pack may have rows that the matrix does not.
                with builder.if_then(builder.icmp_signed(">", left, _I64(row))):
                    scale = builder.load(pointer(builder, scales, _I64(row), _F32, 4), align=4)
                    for token in range(tokens):
                        total = builder.fmul(_sum(builder, products[row][token]), scale)
                        index = builder.add(builder.mul(_I64(token), token_outputs), _I64(row))
                        place = pointer(builder, outputs, index, _F32, 4)
                        before = builder.select(first, _F32(0.0), builder.load(place, align=4))
                        builder.store(builder.fadd(before, total), place, align=4)
            return _context.get_dummy_value()

        return types.void(*(types.int64,) * 8, types.boolean), code

    return tile


@njit(nogil=True, error_model="numpy")
def _packs(weights, inputs, scales, outputs, columns, stride, token_outputs, begin, end, last, first, count):  # type: ignore[no-untyped-def]
    """Packs of rows by the tokens that are left: none."""


def _packs_with(rows: int, tokens: int, packs: Any) -> Any:
    """Code that multiplies packs of rows by so many tokens at a time, and by what is left of them as `packs` does."""
    tile = _tile(rows, tokens)

    @njit(nogil=True, error_model="numpy")
    def more_packs(  # type: ignore[no-untyped-def]
        weights, inputs, scales, outputs, columns, stride, token_outputs, begin, end, last, first, count
    ):
        while count >= tokens:
            for pack in range(begin, end, _PACK):
                for row in range(pack, pack + _PACK, rows):
                    place = weights + pack * stride + LANES * (row - pack)
                    scale, output, left = scales + 4 * row, outputs + 4 * row, last - row
                    tile(place, inputs, scale, output, columns, stride, token_outputs, left, first)
            inputs, outputs = inputs + 4 * tokens * stride, outputs + 4 * tokens * token_outputs
            count -= tokens
        packs(weights, inputs, scales, outputs, columns, stride, token_outputs, begin, end, last, first, count)

    return more_packs


for _tokens, _rows in _ROWS.items():
    _packs = _packs_with(_rows, _tokens, _packs)


@compiled
def _share(work):  # type: ignore[no-untyped-def]
    """A thread's share of a multiplication: some of the packs."""
    weights, scales, inputs, outputs = work[0], work[1], work[2], work[3]
    rows, columns, tokens = work[4], work[5], work[6]
    packs, mine, shares = (rows + _PACK - 1) // _PACK, np.int64(thread()), np.int64(threads())
    end = packs * (mine + 1) // shares * _PACK
    for begin in range(packs * mine // shares * _PACK, end, _BLOCK_ROWS):
        until = min(begin + _BLOCK_ROWS, end)
        for column in range(0, columns, _BLOCK_COLUMNS):
            width = min(_BLOCK_COLUMNS, columns - column)
            block, first = weights + column * _PACK, column == 0
            values = inputs + 4 * column
            _packs(block, values, scales, outputs, width, columns, rows, begin, until, rows, first, tokens)


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
    work = (ctypes.c_int64 * 7)(*places, scale.shape[0], tokens.shape[1], tokens.shape[0])
    parallel_for(_share, work)
    return out
