"""Machine code for the processor that it runs on, by llvmlite and numba, so that nobody needs a compiler.

It runs on the threads of PyTorch's OpenMP, which vLLM binds to the engine's cores; a pool of its own would fight them.
"""

import ctypes
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import cfunc, types

_OF_INTEGERS = types.void(types.CPointer(types.int64))  # a function of an array of integers

_openmp = ctypes.CDLL(None)
for _name in ("omp_get_thread_num", "omp_get_num_threads"):
    llvmlite.binding.add_symbol(_name, ctypes.cast(getattr(_openmp, _name), ctypes.c_void_p).value)
thread = types.ExternalFunction("omp_get_thread_num", types.int32())  # which of the threads that share a work this is
threads = types.ExternalFunction("omp_get_num_threads", types.int32())  # how many share it
_parallel = _openmp.GOMP_parallel
_parallel.argtypes, _parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None


def parallel_for(function: Any, work: Any) -> None:
    """Run what `compiled` gave on all threads at once, and wait for it."""
    _parallel(function.address, work, 0, 0)


def compiled(function: Any, signature: Any = _OF_INTEGERS) -> Any:
    """Machine code of a function, kept for later processes where it may be written anywhere."""
    try:
        return cfunc(signature, cache=True)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        return cfunc(signature)(function)


def pointer(builder: Any, base: Any, offset: Any, kind: Any, size: int) -> Any:
    """The place that is `offset` things of `size` bytes after an address."""
    moved = builder.add(base, builder.mul(offset, ir.Constant(base.type, size)))
    return builder.inttoptr(moved, kind.as_pointer())
