"""A pair of models whose engines are started one by one, to be measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from lookahead_agent.engines.engine_pool import POOL
from lookahead_agent.engines.processes import available_cores
from lookahead_agent.engines.vllm_config import VLLMConfig, as_arguments, require_vllm, runs_on_cpu
from lookahead_agent.engines.vllm_engine import VLLMEngine
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.hardware.choice import Kernel, Precision
from lookahead_agent.models import ModelFacts, choose_models
from lookahead_agent.models.resolve import fetch, fetch_tokenizer
from lookahead_agent.progress import Progress
from lookahead_agent.runtime.engine_selection import EngineRequest, select_engines
from lookahead_agent.runtime.gpu_memory import kv_cache_bytes_per_token, memory_shares
from lookahead_agent.runtime.weights import Platform, weights_in

Role = Literal["target", "draft"]


class Pair:
    """Target and draft, fetched; no engine is started yet.

    Args:
        model: Target: a catalogue name, a folder, or a Hub id.
        draft_model: Draft; None: the catalogue's.
        dummy_weights: Make weights up from the models' configurations, so that only these need to be there.
        engine_args: Arguments of the target's engine.
        draft_engine_args: Arguments of the draft's engine.
        precision: Of the target's weights; None: as vLLM has them; "auto": as they would be chosen here, which for
            made-up weights is as vLLM has them.
        draft_precision: Of the draft's.
        progress: Shown what is done.
        kv_cache_tokens: Tokens for which each engine on a GPU keeps a KV cache; None: a share of the GPU's memory.

    Raises:
        ModelError: A model could not be fetched.
        ConfigurationError: A precision cannot be had.
        MissingExtraError: vLLM is not installed.
    """

    def __init__(
        self,
        model: str,
        draft_model: str | None,
        *,
        dummy_weights: bool,
        engine_args: Mapping[str, Any],
        draft_engine_args: Mapping[str, Any],
        precision: Precision | None,
        draft_precision: Precision | None,
        progress: Progress,
        kv_cache_tokens: int | None = None,
    ) -> None:
        require_vllm()
        if dummy_weights and "int8" in (precision, draft_precision):
            raise ConfigurationError(
                "the precision int8 is read from a folder, and made-up weights have none: choose int8-weights"
            )
        models = choose_models(model, draft_model)
        assert models.draft is not None  # one was asked for
        facts: dict[Role, ModelFacts] = {"target": models.target, "draft": models.draft}
        get = fetch_tokenizer if dummy_weights else fetch
        given: dict[Role, Mapping[str, Any]] = {"target": engine_args, "draft": draft_engine_args}
        self.names = {role: each.name for role, each in facts.items()}
        self.dummy_weights = dummy_weights
        self._progress = progress
        self._folders: dict[Role, Path] = {}
        self._arguments: dict[Role, dict[str, Any]] = {}
        fetched = {role: get(each, progress) for role, each in facts.items()}
        wanted: dict[Role, Precision | None] = {"target": precision, "draft": draft_precision}
        choose = "auto" in wanted.values() and not dummy_weights
        chosen = _precisions_chosen(wanted, given, fetched) if choose else {}
        kernels = {role: chosen.get(role) if each == "auto" else each for role, each in wanted.items()}
        self.precision = {str(role): kernel for role, kernel in kernels.items() if kernel is not None}
        for role in facts:
            weights = weights_in(fetched[role], kernels[role], Platform.detect())
            self._folders[role] = fetched[role] if dummy_weights else weights.write(progress)
            self._arguments[role] = {**weights.arguments, **given[role]}
            if dummy_weights:
                self._arguments[role]["load_format"] = "dummy"
        self._kv_cache_tokens = kv_cache_tokens
        if kv_cache_tokens is None and not runs_on_cpu():
            engines = {role: (self._folders[role], self._arguments[role]) for role in facts}
            for role, share in memory_shares(engines).items():
                self._arguments[role].setdefault("gpu_memory_utilization", share)

    @property
    def arguments(self) -> dict[str, dict[str, Any]]:
        """Of each model's engine, for records of measurements."""
        return {role: dict(arguments) for role, arguments in self._arguments.items()}

    @property
    def draft_folder(self) -> Path:
        """Where the draft is."""
        return self._folders["draft"]

    @property
    def draft_quantization(self) -> str | None:
        """The draft's `quantization`, if its engine is given one."""
        return self._arguments["draft"].get("quantization")

    @property
    def divided(self) -> bool:
        """Whether target and draft have cores of their own: a GPU is shared."""
        return runs_on_cpu()

    @property
    def draws_tokens(self) -> bool:
        """Whether vLLM can accept draft tokens by chance: its CPU build cannot."""
        return not runs_on_cpu()

    @property
    def every_core(self) -> str | None:
        """All cores; None on a GPU."""
        if not runs_on_cpu():
            return None
        from lookahead_agent.cpu.cores import binding

        return binding(available_cores())

    @property
    def shares(self) -> dict[Role, str | None]:
        """Each model's share of the cores; None on a GPU."""
        if not runs_on_cpu():
            return {"target": None, "draft": None}
        from lookahead_agent.cpu.cores import binding, share_cores

        target, draft = share_cores(available_cores(), with_draft=True)
        return {"target": binding(target), "draft": binding(draft)}

    @contextmanager
    def engine(self, role: Role, cores: str | None, **arguments: Any) -> Iterator[VLLMEngine]:
        """An engine of one of the models; shut down with the last that has it.

        Raises:
            EngineError: It could not start.
        """
        arguments = self._arguments[role] | arguments
        if self._kv_cache_tokens is not None:
            # A cache of known size needs no measurement of free memory, so that engines may start at the same time.
            size = self._kv_cache_tokens * kv_cache_bytes_per_token(self._folders[role], arguments)
            arguments = {"gpu_memory_utilization": 0.01, "kv_cache_memory_bytes": size} | arguments
        config = VLLMConfig(self._folders[role], cores, as_arguments(arguments))
        with self._progress.task(f"Loading {role} model {self.names[role]}"):
            started = POOL.acquire(config)
        try:
            yield started
        finally:
            POOL.release(config)


def _precisions_chosen(
    wanted: Mapping[Role, Precision | None],
    given: Mapping[Role, Mapping[str, Any]],
    folders: Mapping[Role, Path],
) -> Mapping[str, Kernel]:
    """What the library would choose for each model, by role."""
    way = EngineRequest(
        precision=wanted["target"] or "auto",
        draft_precision=wanted["draft"] or "auto",
        target_arguments=given["target"],
        draft_arguments=given["draft"],
    )
    return select_engines(way, folders["target"], folders["draft"]).precision
