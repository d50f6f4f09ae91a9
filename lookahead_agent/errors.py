"""Every error that this library raises on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class LookaheadError(Exception):
    """Base class of all errors of this library."""


class ConfigurationError(LookaheadError):
    """A value is invalid; the message names it and says what to use instead."""


class PolicyError(ConfigurationError):
    """A policy does not exist or contradicts itself."""


class ContextLengthError(ConfigurationError):
    """The prompt leaves no room for a reply in the model's context."""


class IsolationError(LookaheadError):
    """No sandbox works on this system; the message says what to install."""


class MissingExtraError(LookaheadError, ImportError):
    """An optional dependency is not installed; the message names the extra that installs it."""


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
    """A download failed; complete parts are kept, and the next run resumes."""


class IntegrityError(ModelError):
    """A downloaded file has the wrong size or sha256."""


class DiskSpaceError(ModelError):
    """There is not enough disk space for a download or a conversion."""


class ConversionError(ModelError):
    """Packaged weights could not be converted to safetensors."""


class ForeignCodeError(LookaheadError):
    """A tool, verifier or server of the user raised an exception that would have ended the program or a task."""


class EngineError(LookaheadError):
    """An engine failed during generation."""


class EngineStartError(EngineError):
    """An engine could not be started."""


def validation_message(error: ValidationError) -> str:
    """Format the problems that pydantic found in one line: each field with its problem."""
    return "; ".join(
        ".".join(str(part) for part in problem["loc"])
        + (": " if problem["loc"] else "")
        + problem["msg"].removeprefix("Value error, ")  # pydantic's prefix of a message of the library's own
        for problem in error.errors()
    )
