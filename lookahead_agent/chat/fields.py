"""Fields of the chat model, by what they are about; users give all of them flat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.utils.utils import secret_from_env
from pydantic import BaseModel, Field, SecretStr

from lookahead_agent.engines.servers import RemoteModel
from lookahead_agent.engines.token_speculation import check_token_speculation
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.generation.call_options import DEFAULT_MAX_TOKENS, MaxTokens, SamplingArguments
from lookahead_agent.hardware.choice import Precision

_SERVERS = (
    ("target", "base_url", "api_key"),
    ("draft", "draft_url", "draft_api_key"),
    ("judge", "judge_url", "judge_api_key"),
    ("embedding", "embedding_url", "embedding_api_key"),
)
"""Role, and the names of the fields for address and key."""


class SamplingFields(SamplingArguments):
    """How tokens are chosen, and where a reply ends; arguments of a call go before these."""

    max_tokens: MaxTokens = DEFAULT_MAX_TOKENS
    """Most tokens of a reply."""


class ServerFields(BaseModel):
    """Which models are behind servers."""

    base_url: str | list[str] | None = None
    """Address of an OpenAI-compatible server for the target, up to and with `/v1`, or of several that are replicas;
    `model` is its name there. None: the target runs in this process."""
    api_key: SecretStr | None = Field(default_factory=secret_from_env("LOOKAHEAD_API_KEY", default=None))
    """Key for that server; None: the environment's `LOOKAHEAD_API_KEY`, if there is one."""
    tokenizer: str | None = None
    """Whose tokenizer the model behind `base_url` has: a catalogue name, a folder or a Hugging Face id; None:
    `model`'s."""
    draft_url: str | list[str] | None = None
    """Address, or addresses, of the draft's server."""
    draft_api_key: SecretStr | None = None
    """Key for that server."""
    draft_tokenizer: str | None = None
    """Whose tokenizer the model behind `draft_url` has; None: `draft_model`'s."""
    judge_url: str | list[str] | None = None
    """Address, or addresses, of the judge's server."""
    judge_api_key: SecretStr | None = None
    """Key for that server."""
    embedding_url: str | list[str] | None = None
    """Address, or addresses, of the embedding model's server."""
    embedding_api_key: SecretStr | None = None
    """Key for that server."""
    timeout: float | None = Field(None, gt=0)
    """Seconds without a token after which the target has failed; None: never in this process, 600 behind a server."""
    max_retries: int = Field(2, ge=0)
    """Times that a request to a server is repeated that failed before it was answered."""

    def remote_models(self, models: Mapping[str, str | None]) -> dict[str, RemoteModel]:
        """The models behind servers, by role.

        Args:
            models: Their names, by role; None: it has none.

        Raises:
            ConfigurationError: An address that is none, a key or a tokenizer without an address, or a model without a
                name.
        """
        found: dict[str, RemoteModel] = {}
        for role, url_field, key_field in _SERVERS:
            model = models[role]
            urls = getattr(self, url_field)
            key = getattr(self, key_field)
            if urls is None:
                if key_field in self.model_fields_set and key is not None:
                    raise ConfigurationError(f"{key_field} is for a server: give its {url_field} too")
                continue
            urls = [urls] if isinstance(urls, str) else urls
            for url in urls:
                if not url.startswith(("http://", "https://")):
                    raise ConfigurationError(
                        f"{url_field} is an http:// or https:// address up to and with /v1, not {url!r}"
                    )
            if not urls:
                raise ConfigurationError(f"{url_field} has no address")
            if model is None and role in ("judge", "embedding"):
                raise ConfigurationError(f"{url_field} needs {role}_model: the model's name on that server")
            secret = key.get_secret_value() if key is not None else None
            found[role] = RemoteModel(tuple(urls), model, secret, self.timeout or 600.0, self.max_retries)
        for role, name in (("target", "tokenizer"), ("draft", "draft_tokenizer")):
            if role not in found and getattr(self, name) is not None:
                raise ConfigurationError(f"{name} is for a model behind a server; one in this process has its own")
        return found


class EngineFields(BaseModel):
    """How engines in this process are arranged."""

    token_speculation: str | dict[str, Any] = "auto"
    """Token-level speculation inside the target's steps, which changes no reply: "auto" (whatever is fastest here),
    "none", "shared_draft" (by what the draft writes beside it), "draft_model", "ngram", "suffix", or vLLM's
    `speculative_config`, as {"method": "eagle3", "model": …, "num_speculative_tokens": 3}."""
    precision: Precision = "auto"
    """Of the target's weights: "bf16", "fp32", "int8" (activations too), "int8-weights" (on a CPU), or "auto": on a CPU
    the fastest of them, "int8" only where it has instructions for that, on a GPU what the model's folder has."""
    draft_precision: Precision = "auto"
    """Of the draft's weights."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the target's vLLM engine (`vllm.AsyncEngineArgs`): tensor_parallel_size, quantization, …"""
    draft_engine_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the draft's vLLM engine."""
    judge_engine_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the judge's vLLM engine, if it has one of its own."""
    cores: tuple[str, str] | None = None
    """CPU cores of target and draft ("0-5", "6,7"); None: chosen so that they do not share any."""
    use_running: bool = True
    """Whether replies come from the engines that `lookahead-agent up` keeps running, where those are the same; else
    engines are started in this process."""

    def _check_engine_settings(self, remote: Mapping[str, RemoteModel]) -> None:
        if "target" not in remote:
            check_token_speculation(self.token_speculation, self.engine_args)
        elif self.token_speculation not in ("none", "auto"):
            raise ConfigurationError(
                "token_speculation is a matter of the target's own server: start it with --speculative-config"
            )
        for role, name in (("target", "engine_args"), ("draft", "draft_engine_args"), ("judge", "judge_engine_args")):
            ignored = sorted(getattr(self, name).keys() - {"max_model_len"})
            if role in remote and ignored:
                raise ConfigurationError(
                    f"{name} are for an engine in this process: give {', '.join(ignored)} to the server"
                )
