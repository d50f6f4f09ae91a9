"""A pair of models whose engines are started one by one, to be measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from lookahead_agent.runtime.engine_selection import EngineRequest, EngineSetup, select_engines
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
        precision: Of the target's weights: see `chosen_kernels`.
        draft_precision: Of the draft's.
        progress: Shows downloads and starts.
        kv_cache_tokens: Tokens for which each engine on a GPU keeps a KV cache; None: a share of the GPU's memory.

    Attributes:
        names: Of the models.
        arguments: Of the models' engines.
        precision: Of the models' weights, where it is given or chosen.
        draft_folder: The folder of the draft.
        draft_quantization: The draft's `quantization`, if its engine is given one.
        divided: Whether target and draft have cores of their own: a GPU is shared.
        draws_tokens: Whether vLLM can accept draft tokens by chance: its CPU build cannot.
        every_core: All cores; None on a GPU.
        shares: Each model's share of the cores; None on a GPU.

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
        given: dict[Role, Mapping[str, Any]] = {"target": engine_args, "draft": draft_engine_args}
        fetched = {role: (fetch_tokenizer if dummy_weights else fetch)(each, progress) for role, each in facts.items()}
        kernels = chosen_kernels({"target": precision, "draft": draft_precision}, given, fetched, dummy_weights)
        self.names = {str(role): each.name for role, each in facts.items()}
        self.dummy_weights = dummy_weights
        self.precision = {str(role): kernel for role, kernel in kernels.items() if kernel is not None}
        self.divided = runs_on_cpu()
        self.draws_tokens = not self.divided
        self.every_core: str | None = None
        self.shares: dict[Role, str | None] = {"target": None, "draft": None}
        if self.divided:
            from lookahead_agent.cpu.cores import binding, share_cores

            self.every_core = binding(available_cores())
            target, draft = share_cores(available_cores(), with_draft=True)
            self.shares = {"target": binding(target), "draft": binding(draft)}
        self.arguments: dict[str, dict[str, Any]] = {}
        self._folders: dict[Role, Path] = {}
        for role, folder in fetched.items():
            weights = weights_in(folder, kernels[role], Platform.detect())
            self._folders[role] = folder if dummy_weights else weights.write(progress)
            made_up = {"load_format": "dummy"} if dummy_weights else {}
            self.arguments[role] = {**weights.arguments, **given[role], **made_up}
        self._progress = progress
        self._kv_cache_tokens = kv_cache_tokens
        if kv_cache_tokens is None and not self.divided:
            engines = {role: (self._folders[role], self.arguments[role]) for role in fetched}
            for name, share in memory_shares(engines).items():
                self.arguments[name].setdefault("gpu_memory_utilization", share)
        self.draft_folder = self._folders["draft"]
        self.draft_quantization: str | None = self.arguments["draft"].get("quantization")

    @contextmanager
    def engine(self, role: Role, cores: str | None, **arguments: Any) -> Iterator[VLLMEngine]:
        """An engine of one of the models; shut down with the last that has it.

        Raises:
            EngineError: It could not start.
        """
        arguments = self.arguments[role] | arguments
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


def chosen_kernels(
    precisions: Mapping[Role, Precision | None],
    arguments: Mapping[Role, Mapping[str, Any]],
    folders: Mapping[Role, Path],
    dummy_weights: bool,
    select: Callable[[EngineRequest, Path, Path], EngineSetup] = select_engines,
) -> dict[Role, Kernel | None]:
    """The precision of each model's weights; None: as vLLM has them.

    Args:
        precisions: "auto" is what a chat model would choose; for made-up weights it is None.
        arguments: Of the engines.
        folders: Of the models.
        dummy_weights: Whether weights are made up.
        select: As `select_engines`.
    """
    chosen: Mapping[str, Kernel] = {}
    if "auto" in precisions.values() and not dummy_weights:
        request = EngineRequest(
            precision=precisions["target"] or "auto",
            draft_precision=precisions["draft"] or "auto",
            target_arguments=arguments["target"],
            draft_arguments=arguments["draft"],
        )
        chosen = select(request, folders["target"], folders["draft"]).precision
    return {role: chosen.get(role) if each == "auto" else each for role, each in precisions.items()}
