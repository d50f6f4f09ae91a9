"""Token-level speculation inside the target's engine: the methods of vLLM, and the shared draft."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from lookahead_agent.engines.shared_draft_proposer import PATH
from lookahead_agent.errors import ConfigurationError, MissingExtraError

TokenSpeculation = Literal["auto", "none", "shared_draft", "draft_model", "ngram", "suffix"]
"""Methods that need nothing more than their name; "auto" chooses among the first three after it."""

# Measured on two cores with the 1.5B and 0.5B models; more draft tokens cost more than they win there.
_SETTINGS: dict[str, dict[str, Any]] = {
    "ngram": {"num_speculative_tokens": 6, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "suffix": {"num_speculative_tokens": 16},
    "draft_model": {"num_speculative_tokens": 4},
    # At most: the proposer chooses the number from pass to pass.
    "shared_draft": {"num_speculative_tokens": 12},
}


def check_token_speculation(method: str | Mapping[str, Any], engine_args: Mapping[str, Any]) -> None:
    """Check a name of `TokenSpeculation` or vLLM's `speculative_config` before any model loads.

    Raises:
        ConfigurationError: No such method, or a method that needs more than its name.
        MissingExtraError: The method's package is not installed.
    """
    if method in ("none", "auto"):
        return
    if "speculative_config" in engine_args:
        raise ConfigurationError("token_speculation and engine_args['speculative_config'] say the same: give only one")
    name = method if isinstance(method, str) else method.get("method")
    if isinstance(method, str) and method not in get_args(TokenSpeculation):
        raise ConfigurationError(
            f"no token-level speculation is called {method!r}: choose one of {', '.join(get_args(TokenSpeculation))}, "
            "or give vLLM's speculative_config as a mapping, such as {'method': 'eagle3', 'model': …, "
            "'num_speculative_tokens': 3}"
        )
    if name in ("eagle", "eagle3", "medusa", "mlp_speculator") and not (
        isinstance(method, Mapping) and "model" in method
    ):
        raise ConfigurationError(f"{name} needs its own model: token_speculation={{'method': {name!r}, 'model': …}}")
    if name == "suffix" and find_spec("arctic_inference") is None:
        raise MissingExtraError("suffix decoding needs a package: pip install arctic-inference, or choose ngram")


def uses_shared_draft(speculative_config: Any) -> bool:
    """Whether vLLM's `speculative_config` is that of a target with a shared draft."""
    return isinstance(speculative_config, Mapping) and speculative_config.get("model") == PATH


def speculates_by_draft_model(method: str | Mapping[str, Any]) -> bool:
    """Whether the chat model's draft model proposes draft tokens too, on the target's cores or beside it."""
    name = method if isinstance(method, str) else method.get("method")
    return name == "shared_draft" or (
        name == "draft_model" and "model" not in (method if isinstance(method, Mapping) else ())
    )


def speculative_config(
    method: str | Mapping[str, Any], draft: Path | None, *, on_cpu: bool, draft_quantization: str | None = None
) -> dict[str, Any] | None:
    """vLLM's `speculative_config` for a method; None for "none".

    Args:
        method: As for `check_token_speculation`.
        draft: Folder of the draft model, for "draft_model" without a model of its own.
        on_cpu: Whether the engine runs on a CPU.
        draft_quantization: The draft's `quantization`; None: as its folder says.

    Raises:
        ConfigurationError: "draft_model" without a draft model, or a method that does not run on a CPU.
    """
    if method == "none":
        return None
    given = {"method": method} if isinstance(method, str) else dict(method)
    name = str(given.get("method"))
    if on_cpu and name in ("ngram_gpu", "medusa", "mlp_speculator"):
        raise ConfigurationError(
            f"token-level speculation by {name} does not run on a CPU: choose ngram or draft_model"
        )
    config = _SETTINGS.get(name, {}) | given
    if name == "shared_draft":
        return config | {"method": "custom_class", "model": PATH}
    if name == "draft_model" and "model" not in config:
        if draft is None:
            raise ConfigurationError("token_speculation='draft_model' needs a draft model: name one with draft_model=…")
        config["model"] = str(draft)
    if draft_quantization is not None and config.get("model") == str(draft):
        config["quantization"] = draft_quantization
    return config
