"""Fields of the chat model, by what they are about; users give all of them flat."""

from collections.abc import Sequence
from typing import Any

from langchain_core.utils.utils import secret_from_env
from pydantic import BaseModel, Field, SecretStr

from lookahead_agent.engines.servers import RemoteModel
from lookahead_agent.engines.vllm_config import check_token_speculation, speculates_by_draft_model
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.hardware.choice import Precision
from lookahead_agent.models.catalogue import DEFAULT_SET
from lookahead_agent.models.resolve import choose_models, has_draft
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.runtime.engine_selection import RuntimeSpec
from lookahead_agent.runtime.runtime import Runtime


class EngineFields(BaseModel):
    """The models, in this process or behind servers, and the choice of engines in this process."""

    model: str = DEFAULT_SET
    """Target model: a name of the catalogue, a folder, or a Hugging Face id."""
    draft_model: str | None = None
    """Draft model: a folder or a Hugging Face id; None: the catalogue's draft for the target."""
    judge_model: str | None = None
    """Judge of step pairs: a catalogue name, a folder or a Hugging Face id, or with `judge_url` its name there; None:
    the target judges."""
    embedding_model: str | None = None
    """A sentence-transformers model: a folder or a Hugging Face id, or with `embedding_url` its name there; None: the
    catalogue's."""
    base_url: str | None = None
    """Address of an OpenAI-compatible server for the target, up to and with `/v1`; `model` is its name there. None: the
    target runs in this process."""
    api_key: SecretStr | None = Field(default_factory=secret_from_env("LOOKAHEAD_API_KEY", default=None))
    """Key for that server; None: the environment's `LOOKAHEAD_API_KEY`, if there is one."""
    tokenizer: str | None = None
    """Whose tokenizer the model behind `base_url` has: a catalogue name, a folder or a Hugging Face id; None:
    `model`'s."""
    draft_url: str | None = None
    """Address of the draft's server, as `base_url` is the target's; so are the following for the judge and so on."""
    draft_api_key: SecretStr | None = None
    draft_tokenizer: str | None = None
    """Whose tokenizer the model behind `draft_url` has; None: `draft_model`'s."""
    judge_url: str | None = None
    judge_api_key: SecretStr | None = None
    embedding_url: str | None = None
    embedding_api_key: SecretStr | None = None
    timeout: float | None = Field(None, gt=0)
    """Seconds without a token after which the target has failed; None: never in this process, 600 behind a server."""
    max_retries: int = Field(2, ge=0)
    """Times that a request to a server is repeated that failed before it was answered."""

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
    use_daemon: bool = True
    """Whether the server that `lookahead-agent up` runs generates the replies, where it has the same engines."""

    def _remote_models(self) -> dict[str, RemoteModel]:
        found: dict[str, RemoteModel] = {}
        for role in ("target", "draft", "judge", "embedding"):
            own = "" if role == "target" else f"{role}_"
            url_field, key_field = f"{own or 'base_'}url", f"{own}api_key"
            model: str | None = getattr(self, f"{own}model")
            url: str | None = getattr(self, url_field)
            key = getattr(self, key_field)
            if url is None:
                if key_field in self.model_fields_set and key is not None:
                    raise ConfigurationError(f"{key_field} is for a server: give its {url_field} too")
                continue
            if not url.startswith(("http://", "https://")):
                raise ConfigurationError(
                    f"{url_field} is an http:// or https:// address up to and with /v1, not {url!r}"
                )
            if model is None and role in ("judge", "embedding"):
                raise ConfigurationError(f"{url_field} needs {role}_model: the model's name on that server")
            secret = key.get_secret_value() if key is not None else None
            found[role] = RemoteModel(url, model, secret, self.timeout or 600.0, self.max_retries)
        for role, name in (("target", "tokenizer"), ("draft", "draft_tokenizer")):
            if role not in found and getattr(self, name) is not None:
                raise ConfigurationError(f"{name} is for a model behind a server; one in this process has its own")
        return found

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
        arguments = (self.engine_args, self.draft_engine_args, self.judge_engine_args)
        speculation = self.token_speculation if "target" not in remote else "none"
        spec = RuntimeSpec(models, *arguments, remote, speculation, self.precision, self.draft_precision, self.cores)
        # Behind a server, what the target costs is not known here: steps are the only way to win something.
        steps = [policy.forces_speculation or ("target" in remote and policy.speculates) for policy in policies]
        return Runtime.shared(spec, expects_draft=any(steps))
