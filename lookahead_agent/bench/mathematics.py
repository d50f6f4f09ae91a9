"""Compares mathematical expressions with math-verify, in a child process: a model's expression may never end.

The parent sends pairs of an expected answer and an expression, or None in place of it, as JSON. The child returns
whether each pair is equal, or can be compared at all; None means that it could not tell.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from lookahead_agent.errors import ConfigurationError, MissingExtraError

_SECONDS = 60  # time limit of the child, whose imports take some seconds
_CPU_SECONDS = 10  # CPU time limit of the child
_BYTES = 2 << 30  # memory of the child

FormulaPair = tuple[str, str | None]


def is_installed() -> bool:
    """Return whether math-verify is installed."""
    return importlib.util.find_spec("math_verify") is not None


def compare(pairs: Sequence[FormulaPair], cpu_seconds: int = _CPU_SECONDS) -> list[bool | None]:
    """Compare pairs of expressions in LaTeX; None for those that cannot be compared within the CPU seconds.

    Raises MissingExtraError if math-verify is not installed, and ConfigurationError if it cannot be started.
    """
    if not is_installed():
        raise MissingExtraError("answers in mathematics need math-verify: pip install 'lookahead-agent[bench]'")
    command = [sys.executable, "-P", "-c", f"from {__name__} import _main; _main({cpu_seconds})"]
    try:
        done = subprocess.run(command, input=json.dumps(pairs).encode(), capture_output=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return [None] * len(pairs)
    except OSError as error:
        raise ConfigurationError(f"math-verify cannot be started: {error}") from error
    results = [{"true": True, "false": False}.get(line) for line in done.stdout.decode().split()]
    return [*results, *[None] * (len(pairs) - len(results))]


def _main(cpu_seconds: int) -> None:
    """Read pairs from the input, and write a line for each."""
    import logging

    with suppress(ImportError):  # on Windows the parent's timeout is all there is
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
        resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    logging.disable()
    from math_verify import parse, verify

    for expected, given in json.loads(sys.stdin.buffer.read()):
        try:
            first = parse(f"\\boxed{{{expected}}}")
            # Without an expression of SymPy, math-verify returns the text alone.
            result: bool | None = bool(first) and not isinstance(first[0], str)
            if result and given is not None:
                result = verify(first, parse(f"\\boxed{{{given}}}"))
        except Exception:  # SymPy raises it for an expression that it cannot take
            result = None
        sys.stdout.write(f"{json.dumps(result)}\n")
        sys.stdout.flush()
