"""Compiles machine code for this processor with llvmlite and numba, so that users need no compiler.

It runs on PyTorch's OpenMP threads, which vLLM binds to the engine's cores; a second pool would compete with them.
"""

import ctypes
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import cfunc, types

_KERNEL = types.void(types.CPointer(types.int64))  # signature of a function of a work array of integers

_openmp = ctypes.CDLL(None)
for _name in ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier"):
    llvmlite.binding.add_symbol(_name, ctypes.cast(getattr(_openmp, _name), ctypes.c_void_p).value)
thread_index = types.ExternalFunction("omp_get_thread_num", types.int32())  # index of the calling thread in its team
thread_count = types.ExternalFunction("omp_get_num_threads", types.int32())  # number of threads in the team
wait_for_team = types.ExternalFunction("GOMP_barrier", types.void())  # barrier for all threads of the team
_parallel = _openmp.GOMP_parallel
_parallel.argtypes, _parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None


def parallel_for(function: Any, work: Any) -> None:
    """Run a function from `compile_function` on all threads at once, and wait for them."""
    _parallel(function.address, work, 0, 0)


def compile_function(function: Any, signature: Any = _KERNEL) -> Any:
    """Compile a function to machine code, cached on disk for later processes if numba finds a writable folder."""
    try:
        return cfunc(signature, cache=True)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        return cfunc(signature)(function)


def pointer(builder: Any, base: Any, offset: Any, kind: Any, size: int) -> Any:
    """The pointer to the element that is `offset` elements of `size` bytes after an address."""
    address = builder.add(base, builder.mul(offset, ir.Constant(base.type, size)))
    return builder.inttoptr(address, kind.as_pointer())
