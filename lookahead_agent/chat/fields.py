"""The chat model's fields for models and engines, and the runtime that they select."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from langchain_core.utils.utils import secret_from_env
from pydantic import AfterValidator, BaseModel, Field, SecretStr

from lookahead_agent.engines.affinity import AFFINITY_HEADERS, FIXED_HEADERS
from lookahead_agent.engines.servers import RemoteModel, check_key
from lookahead_agent.engines.vllm_config import check_token_speculation, speculates_by_draft_model
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.hardware.gpus import fill_parallel_size
from lookahead_agent.models.catalogue import DEFAULT_SET, ModelSet
from lookahead_agent.models.resolve import choose_models, has_draft
from lookahead_agent.modes.table import Precision
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.runtime.engine_selection import RuntimeSpec
from lookahead_agent.runtime.runtime import Runtime

_SECRET = re.compile(r"(?:token|key|secret|password)\Z")  # ends the names of engine arguments that are secrets


def _with_secrets(arguments: dict[str, Any]) -> dict[str, Any]:
    """Wrap the secrets among engine arguments, such as `hf_token`, so that neither `repr` nor a trace shows them."""
    return {
        name: SecretStr(value) if isinstance(value, str) and _SECRET.search(name) else value
        for name, value in arguments.items()
    }


def _without_secrets(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.get_secret_value() if isinstance(value, SecretStr) else value for name, value in arguments.items()
    }


EngineArguments = Annotated[dict[str, Any], AfterValidator(_with_secrets)]

_key_of_target = secret_from_env("LOOKAHEAD_API_KEY", default=None)


def _key_from_environment(key_field: str) -> SecretStr | None:
    return _key_of_target() if key_field == "api_key" else None


def _header_value(key_field: str, key: SecretStr | None) -> str | None:
    return check_key(key.get_secret_value() if key is not None else None, key_field)


def _header_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name) or name.lower() in FIXED_HEADERS:
        raise ConfigurationError(
            f"affinity_headers has {name[:80]!r}: give names of HTTP headers, such as 'X-Session-ID'"
        )
    return name


class EngineFields(BaseModel):
    """The model of each role, in this process or behind a server, and the options of the engines in this process."""

    model: str = DEFAULT_SET
    """Target model: a catalogue name, folder, Hugging Face id, or its name at `base_url`."""
    draft_model: str | None = None
    """Draft model: a folder, Hugging Face id, name of a catalogue set, or its name at `draft_url`; None: the
    catalogue's draft for `model`."""
    judge_model: str | None = None
    """Judge of step pairs: a catalogue name, folder, Hugging Face id, or its name at `judge_url`; None: the catalogue's
    where a GPU has room for it, else the target."""
    embedding_model: str | None = None
    """sentence-transformers model: a folder, Hugging Face id, or its name at `embedding_url`; None: the catalogue's."""
    base_url: str | None = None
    """URL of the target's OpenAI-compatible server, including `/v1`; None: the target runs in this process."""
    api_key: SecretStr | None = Field(default_factory=_key_of_target)
    """API key for `base_url`; by default the environment variable `LOOKAHEAD_API_KEY`."""
    tokenizer: str | None = None
    """Model whose tokenizer `base_url` uses: a catalogue name, folder or Hugging Face id; None: `model`."""
    draft_url: str | None = None
    """URL of the draft's server, like `base_url`; None: the draft runs in this process."""
    draft_api_key: SecretStr | None = None
    """API key for `draft_url`."""
    draft_tokenizer: str | None = None
    """Model whose tokenizer `draft_url` uses; None: `draft_model`."""
    judge_url: str | None = None
    """URL of the judge's server; None: the judge runs in this process, or is the target."""
    judge_api_key: SecretStr | None = None
    """API key for `judge_url`."""
    embedding_url: str | None = None
    """URL of the embedding model's server; None: the model runs in this process."""
    embedding_api_key: SecretStr | None = None
    """API key for `embedding_url`."""
    timeout: float | None = Field(None, gt=0)
    """Seconds without a token after which the target has failed; None: never in this process, 600 behind a server."""
    stall_timeout: float | None = Field(120.0, gt=0)
    """Seconds in which the target's engine in this process gives no token to any call, after which it has failed; each
    token of a prompt adds a tenth of a second. None: never. For a target behind a server, it applies only if set."""
    max_retries: int = Field(2, ge=0)
    """Failures of a server request in a row, without a new token between them, after which it is sent again. A reply
    that a server has begun waits for one that is away, as long as `timeout`. 0: no request is sent again."""

    affinity_headers: tuple[str, ...] = AFFINITY_HEADERS
    """Headers of server requests with a key that is the same for all requests of a reply, a thread and a conversation,
    so that a load balancer sends them to one replica. Empty: none."""

    token_speculation: str | dict[str, Any] = "auto"
    """Lossless token speculation within the target's steps: "auto" (the fastest method on this machine), "none",
    "shared_draft" (the tokens of the draft's steps), "draft_model", "ngram", "suffix", or vLLM's `speculative_config`,
    such as `{"method": "eagle3", "model": …, "num_speculative_tokens": 3}`."""
    precision: Precision = "auto"
    """Precision of the target's weights: "bf16", "fp32", "int8" (activations too), or "auto": the fastest on a CPU, and
    the folder's precision on a GPU."""
    draft_precision: Precision = "auto"
    """Precision of the draft's weights."""
    engine_args: EngineArguments = Field(default_factory=dict)
    """Arguments of the target's vLLM engine (`vllm.AsyncEngineArgs`), such as tensor_parallel_size or quantization."""
    draft_engine_args: EngineArguments = Field(default_factory=dict)
    """Arguments of the draft's vLLM engine."""
    judge_engine_args: EngineArguments = Field(default_factory=dict)
    """Arguments of the judge's vLLM engine, if the judge has its own."""
    cores: tuple[str, str] | None = None
    """CPU cores of target and draft, such as ("0-5", "6,7"); None: chosen automatically, without overlap."""
    gpus: dict[Literal["target", "draft", "judge"], str] = Field(default_factory=dict)
    """GPUs of the engines in this process, such as `{"target": "0,1", "draft": "2"}`, as numbers among the visible
    ones. Several GPUs shard an engine by tensor parallelism, unless its arguments say otherwise. A role that is left
    out takes a GPU of its own if there is one, else shares one."""
    mps: bool = True
    """Whether engines that share a GPU run at the same time where NVIDIA's Multi-Process Service is installed: the
    library starts a server of its own unless one runs, and ends it with the engines. False: it starts none."""
    use_daemon: bool = True
    """Whether the daemon of `lookahead-agent up` generates the replies if it runs the same engines."""

    def _remote_models(self) -> dict[str, RemoteModel]:
        remote: dict[str, RemoteModel] = {}
        for role in ("target", "draft", "judge", "embedding"):
            prefix = "" if role == "target" else f"{role}_"
            url_field, key_field = f"{prefix or 'base_'}url", f"{prefix}api_key"
            model: str | None = getattr(self, f"{prefix}model")
            url: str | None = getattr(self, url_field)
            key = _header_value(key_field, getattr(self, key_field))
            if url is None:
                # `configurable_fields` passes every field on, also a key that comes from the environment.
                if key is not None and key != _header_value(key_field, _key_from_environment(key_field)):
                    raise ConfigurationError(f"{key_field} is for a server: give its {url_field} too")
                continue
            if not url.startswith(("http://", "https://")):
                scheme, separator, _ = url.partition("://")  # the rest may be a key in the wrong place
                found = f", not {scheme}://" if separator else ""
                raise ConfigurationError(f"{url_field} is an http:// or https:// address up to and with /v1{found}")
            try:
                parts = urlsplit(url)
            except ValueError:
                raise ConfigurationError(f"{url_field} is not a valid address: check its host") from None
            if parts.query or parts.fragment:
                raise ConfigurationError(
                    f"{url_field} has a query or a fragment, after which no path can follow: give the address up to "
                    f"and with /v1, and a key as {key_field}"
                )
            if "@" in parts.netloc:
                raise ConfigurationError(
                    f"{url_field} has a user name or a password, which messages would show: give {key_field}"
                )
            if model is None and role in ("judge", "embedding"):
                raise ConfigurationError(f"{url_field} needs {role}_model: the model's name on that server")
            headers = tuple(map(_header_name, self.affinity_headers))
            remote[role] = RemoteModel(url, model, key, self.timeout or 600.0, self.max_retries, headers)
        for role, name in (("target", "tokenizer"), ("draft", "draft_tokenizer")):
            if role not in remote and getattr(self, name) is not None:
                raise ConfigurationError(f"{name} is for a model behind a server; one in this process has its own")
        return remote

    def _check_unused(self, remote: Collection[str], models: ModelSet) -> None:
        """Raise ConfigurationError for an option that no engine of this configuration reads."""
        for name in ("max_retries", "affinity_headers"):
            if not remote and self._is_given(name):
                raise ConfigurationError(f"{name} is for models behind servers: leave it out, or give base_url")
        for role, name in (("target", "precision"), ("draft", "draft_precision")):
            if role in remote and self._is_given(name):
                raise ConfigurationError(f"{name} is for an engine in this process: the {role}'s server has its own")
        if {"target", "draft"} <= set(remote) and self._is_given("cores"):
            raise ConfigurationError("cores are for engines in this process: target and draft are behind servers")
        if self.judge_engine_args and "judge" not in remote and models.judge in (None, models.target, models.draft):
            raise ConfigurationError(
                "judge_engine_args are for a judge of its own: give another judge_model, or arguments of the engine "
                "that judges"
            )
        for role in self.gpus:
            if role in remote:
                raise ConfigurationError(
                    f"gpus[{role!r}] is for an engine in this process: the {role} is behind a server"
                )
        for name in ("draft_engine_args", "draft_precision"):
            if models.draft is None and "draft" not in remote and getattr(self, name) not in ({}, "auto"):
                raise ConfigurationError(f"{name} is for a draft model: give draft_model")

    def _is_given(self, name: str) -> bool:
        """Whether a field has another value than its default."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    def _find_runtime(self, policies: Sequence[VerifierPolicy]) -> Runtime:
        remote = self._remote_models()
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
        wants_draft = (
            any(policy.speculates for policy in policies)
            or self.draft_model is not None
            or speculates_by_draft_model(self.token_speculation)
            or (self.token_speculation == "auto" and has_draft(self.model))
        )
        models = choose_models(
            self.model if self.tokenizer is None else self.tokenizer,
            self.draft_model if self.draft_tokenizer is None else self.draft_tokenizer,
            draft_wanted=wants_draft,
            judge=self.judge_model if "judge" not in remote else None,
            embedding=self.embedding_model if "embedding" not in remote else None,
        )
        self._check_unused(remote, models)
        given = {"target": self.engine_args, "draft": self.draft_engine_args, "judge": self.judge_engine_args}
        target, draft, judge = (
            fill_parallel_size(_without_secrets(each), self.gpus.get(role), role)  # type: ignore[call-overload]
            for role, each in given.items()
        )
        speculation = self.token_speculation if "target" not in remote else "none"
        spec = RuntimeSpec(
            models=models,
            target_arguments=target,
            draft_arguments=draft,
            judge_arguments=judge,
            remote=remote,
            token_speculation=speculation,
            precision=self.precision,
            draft_precision=self.draft_precision,
            cores=self.cores,
            gpus=dict(self.gpus.items()),
            mps=self.mps,
        )
        # Behind a server, the target's cost is unknown, and only step speculation can make it faster.
        steps = [policy.forces_speculation or ("target" in remote and policy.speculates) for policy in policies]
        return Runtime.find_or_create(spec, expects_draft=any(steps))
