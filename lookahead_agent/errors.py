"""Every error that this library raises on purpose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError


class LookaheadError(Exception):
    """Base class of all errors of this library."""


class ConfigurationError(LookaheadError):
    """A value that cannot work; the message says which and what to use instead."""


class PolicyError(ConfigurationError):
    """A policy that does not exist or contradicts itself."""


class ContextLengthError(ConfigurationError):
    """The prompt leaves no room for a reply in the model's context."""


class IsolationError(LookaheadError):
    """No sandbox for a program works here; the message says what to install."""


class MissingExtraError(LookaheadError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


@contextmanager
def extra_imports(message: str) -> Iterator[None]:
    """Raise MissingExtraError with this message if an import within the context fails."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(message) from error


class ModelError(LookaheadError):
    """A model could not be made available."""


class ModelNotFoundError(ModelError):
    """No local folder, Hub repository or package provides the model."""


class DownloadError(ModelError):
    """A download failed; what was complete is kept and the next run resumes."""


class IntegrityError(ModelError):
    """A downloaded file has the wrong size or sha256."""


class DiskSpaceError(ModelError):
    """There is not enough disk space for a download or a conversion."""


class ConversionError(ModelError):
    """Packaged weights could not be converted to safetensors."""


class EngineError(LookaheadError):
    """An engine failed while it generated."""


class EngineStartError(EngineError):
    """An engine could not be started."""


def validation_message(error: ValidationError) -> str:
    """What pydantic found wrong, in one line: each field with what is wrong about it."""
    return "; ".join(
        ".".join(str(part) for part in problem["loc"]) + (": " if problem["loc"] else "") + problem["msg"]
        for problem in error.errors()
    )


def check_encodable(value: Any, name: str) -> None:
    """Check that every text in a text, or in lists and mappings of them, can be encoded; errors call it `name`.

    Raises:
        ConfigurationError: A text has a lone surrogate, which is half a character; the message says where.
    """
    left: list[tuple[Any, str]] = [(value, name)]
    while left:
        value, name = left.pop()
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise ConfigurationError(
                    f"{name}: character {error.start} is the lone surrogate U+{ord(value[error.start]):04X}, half a "
                    "character; replace it, for example by text.encode(errors='replace').decode()"
                ) from None
        elif isinstance(value, Mapping):
            left += [(key, f"a key of {name}") for key in value]
            left += [(entry, f"{name}.{ascii(key)[1:-1]}"[:100]) for key, entry in value.items()]
        elif isinstance(value, (list, tuple)):
            left += [(entry, f"{name}.{place}"[:100]) for place, entry in enumerate(value)]
