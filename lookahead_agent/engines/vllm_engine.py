"""An engine on vLLM, which runs in child processes of this process."""

import asyncio
import logging
import os
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, aclosing
from dataclasses import replace
from typing import Any

import psutil

from lookahead_agent.cpu import NO_DRAFT
from lookahead_agent.engines import processes, vllm_config
from lookahead_agent.engines.continuation import Continuation, UnavailableError
from lookahead_agent.engines.json_schema import composes, for_llguidance
from lookahead_agent.engines.protocol import Delta, Sampling, room_for_reply
from lookahead_agent.engines.shared_draft import BufferLines, SharedDraftBuffer
from lookahead_agent.engines.shared_draft_proposer import BUFFER
from lookahead_agent.engines.starter import EngineProcess, StartError, environment_kept
from lookahead_agent.engines.tokenizer import HFTokenizer, Tokenizer
from lookahead_agent.engines.vllm_config import VLLMConfig
from lookahead_agent.errors import ConfigurationError, EngineError, EngineStartError
from lookahead_agent.system.background import in_daemon_thread

logger = logging.getLogger(__name__)

_SHUT_DOWN = "the engine was shut down"
_STABLE_SECONDS = 600.0  # seconds since a restart, after which another death of the processes may have another cause
_SIGN_OF_LIFE = 5.0  # seconds between deltas of a request that waits for a restart

_import_lock = threading.Lock()  # transformers imports its modules on first use, unsafe in two threads at once
_memory_lock = threading.Lock()  # delays starts on a GPU while an engine starts there that measures the free memory

IN_ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The `distributed_executor_backend` of an engine core that is its own worker. It is a path, since vLLM replaces the
name on CPUs: it cannot bind the threads of a process that has started OpenMP."""


class VLLMEngine:
    """An engine on vLLM's `AsyncLLM`. It may be created in any thread and is used from one event loop.

    Raises MissingExtraError, ConfigurationError for an unknown argument, or EngineStartError; a failure leaves no
    process.
    """

    def __init__(self, config: VLLMConfig, clock: Callable[[], float] = time.monotonic) -> None:
        vllm_config.require_vllm()
        if vllm_config.runs_on_cpu() and (problem := processes.shared_memory_problem()) is not None:
            raise EngineStartError(f"vLLM cannot start {config.model.name}: {problem}")
        self.restarts = False  # whether a death of its processes starts them again, for a target's replies
        self._config = config
        self._clock = clock
        self._running: set[str] = set()
        self._starting: set[asyncio.Future[Any]] = set()
        self._state_lock = threading.Lock()  # lock of the attributes that `close` shares with a restart
        self._closed = False
        self._unfinished: EngineProcess | None = None  # the process of a start that is not finished
        self._restarting: asyncio.Task[None] | None = None
        self._restarted_at: float | None = None  # time of the latest restart by the clock
        self.processes: list[psutil.Process] = []
        self._llm: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        self._start()

    def _start(self) -> None:
        """Start vLLM's processes, and connect to them; see the class for the errors."""
        config = self._config
        uses_shared_draft = vllm_config.uses_shared_draft(dict(config.arguments).get("speculative_config"))
        shared_draft = SharedDraftBuffer() if uses_shared_draft else None
        process: EngineProcess | None = None
        try:
            with ExitStack() as starting:
                if not vllm_config.runs_on_cpu():
                    starting.enter_context(_memory_lock)
                cores = vllm_config.worker_cores(config)
                environment = vllm_config.process_environment(config, cores)
                process = EngineProcess(_job(config, shared_draft, cores), environment)
                with self._state_lock:
                    self._unfinished = process
                    if self._closed:
                        raise EngineError(_SHUT_DOWN)
                if "kv_cache_memory_bytes" in dict(config.arguments):
                    starting.close()
                if self._llm is None:
                    # Meanwhile, in this process:
                    with _import_lock, environment_kept(), processes.gc_paused():
                        self.tokenizer: Tokenizer = HFTokenizer(config.model)
                        _import_vllm()
                llm = _connect(process)
                with self._state_lock:
                    if not self._closed:
                        self._llm, self._process, self._shared_draft = llm, process, shared_draft
                        self.processes = list(processes.process_trees([process.pid]))
                        self.context_length = int(llm.model_config.max_model_len)
                if self._llm is not llm:
                    llm.shutdown()
                    raise EngineError(_SHUT_DOWN)
        except BaseException as error:
            if process is not None:
                process.finish_start(failed=True)
            if isinstance(error, StartError) and error.is_refused:
                raise ConfigurationError(str(error)) from None
            if isinstance(error, ConfigurationError) or not isinstance(error, Exception):
                raise
            reason = processes.start_failure_reason(error)
            raise EngineStartError(f"vLLM could not start {config.model.name}: {reason}") from error
        finally:
            self._unfinished = None
            if shared_draft is not None:
                shared_draft.forget_file()
        process.finish_start(failed=False)

    @property
    def in_flight(self) -> int:
        """The number of running requests."""
        return len(self._running)

    @property
    def description(self) -> dict[str, Any]:
        """The engine's cores and arguments, including the model's name, for records of measurements."""
        arguments = vllm_config.engine_arguments(self._config)
        return {"cores": self._config.cores, "arguments": vllm_config.without_folders(arguments)}

    @property
    def healthy(self) -> bool:
        """Whether the engine is open, and vLLM has reported no failure from which a restart would recover."""
        return not self._closed and (not self._llm.errored or self._restarting is not None or self._can_restart)

    @property
    def _can_restart(self) -> bool:
        """Whether the processes may be started again; they would end again if their requests or the memory end them."""
        is_stable = self._restarted_at is None or self._clock() - self._restarted_at >= _STABLE_SECONDS
        return self.restarts and is_stable and not self._closed

    @property
    def shared_draft(self) -> bool:
        """Whether the engine takes draft tokens from a shared draft."""
        return self._shared_draft is not None

    def draft_lines(self, prompt_ids: Sequence[int]) -> BufferLines:
        """The lines to which a draft writes its tokens of one reply; see `SupportsSharedDraft`."""
        if self._shared_draft is None:
            raise ConfigurationError("this engine takes no draft tokens: start it with a shared draft")
        return self._shared_draft.draft_lines(prompt_ids)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        """Generate from token ids; see `Engine.generate`.

        If vLLM's processes end, those of a target are started again, once for all running requests, which go on from
        their tokens. While they start, deltas without tokens show that the engine works.
        """
        room = room_for_reply(self._config.model.name, self.context_length, prompt_ids)
        limited = replace(sampling, max_tokens=min(sampling.max_tokens, room))
        continuation = Continuation(prompt_ids, limited, self.tokenizer.eos_ids)
        has_resumed = False
        while True:
            llm = self._llm
            try:
                async with aclosing(self._request(*continuation.request)) as deltas:
                    async for delta in deltas:
                        if (new := continuation.take(delta)) is not None:
                            yield new
                return
            except UnavailableError as failure:
                if (end := continuation.end) is not None:
                    yield end
                    return
                if has_resumed or not continuation.can_resume or self._closed:
                    raise
                if self._llm is llm:
                    restart = self._restart(failure)
                    while not restart.done():  # it continues if this request is closed
                        await asyncio.wait({restart}, timeout=_SIGN_OF_LIFE)
                        yield Delta(())
                    if self._closed:
                        raise EngineError(_SHUT_DOWN) from None
                    if (error := restart.exception()) is not None:
                        raise EngineError(f"{failure}; {error}") from error
                has_resumed = True
                continuation.resume()

    def _restart(self, failure: UnavailableError) -> asyncio.Task[None]:
        """The task that starts vLLM's processes again, one for all requests; raises the failure if they may not."""
        if self._restarting is None:
            if not self._can_restart:
                raise failure
            logger.warning("%s. The engine is started again, and its replies go on", failure)
            self._restarted_at = self._clock()
            self._restarting = asyncio.create_task(self._start_again(self._llm))
            # Its requests may all be closed before it fails, so that nobody asks for the error.
            self._restarting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._restarting

    async def _start_again(self, ended: Any) -> None:
        def start() -> None:
            ended.shutdown()
            _disable_shutdown(ended)
            processes.end_processes(self.processes)
            self._start()

        try:
            await in_daemon_thread(start)
        except asyncio.CancelledError:
            raise EngineError(_SHUT_DOWN) from None
        finally:
            self._restarting = None

    async def _request(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        """The deltas of one request; raises UnavailableError if vLLM's processes end."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        if self._closed:
            raise EngineError(_SHUT_DOWN)
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.current_thread()
        request_id = uuid.uuid4().hex
        prompt: dict[str, Any] = {"prompt_token_ids": list(prompt_ids)}
        if sampling.structured is None:
            # vLLM then skips its single preprocessing thread, which compiles the grammars of other requests.
            prompt["type"] = "token"
        if sampling.cache_salt is not None:
            prompt["cache_salt"] = sampling.cache_salt
        llm, process = self._llm, self._process
        outputs = llm.generate(prompt, _sampling_params(sampling), request_id)
        self._running.add(request_id)
        try:
            output = await self._first_output(outputs)
            cached = output.num_cached_tokens if output is not None else None
            while output is not None:
                if self._closed:
                    raise EngineError(_SHUT_DOWN)
                completion = output.outputs[0]
                if completion.finish_reason not in (None, "stop", "length"):
                    if sampling.structured is not None and completion.finish_reason == "error":
                        raise ConfigurationError("vLLM cannot hold the reply to its form (its log says why)")
                    raise EngineError(f"vLLM ended a request ({completion.finish_reason}); its log says why")
                logprobs = None
                if completion.logprobs is not None:
                    logprobs = tuple(
                        {token: entry.logprob for token, entry in position.items()} for position in completion.logprobs
                    )
                known = None
                if sampling.prompt_logprobs and output.prompt_logprobs is not None:
                    positions = zip(prompt_ids, output.prompt_logprobs, strict=True)
                    known = tuple(entry[token].logprob if entry is not None else None for token, entry in positions)
                yield Delta(
                    tuple(completion.token_ids),
                    logprobs,
                    completion.finish_reason,
                    known,
                    cached,
                    _proposals(completion.spec_decode_metrics),
                )
                cached = None
                output = await anext(outputs, None)
        except (EngineDeadError, EngineGenerateError) as error:
            reason = str(error).strip() or f"{type(error).__name__} (VLLM_LOGGING_LEVEL=INFO shows vLLM's log)"
            if self._closed or not llm.errored:
                raise EngineError(f"vLLM failed on {self._config.model.name}: {reason}") from error
            reason = processes.crash_reason(await asyncio.to_thread(process.exit_code))
            raise UnavailableError(f"vLLM failed on {self._config.model.name}: {reason}") from error
        except (VLLMClientError, ValueError) as error:
            raise ConfigurationError(f"vLLM refuses the request: {error}") from error
        finally:
            self._running.discard(request_id)
            await outputs.aclose()

    async def check(self, sampling: Sampling) -> None:
        """Raise ConfigurationError, with vLLM's reason, if vLLM refuses these parameters, such as a JSON schema."""
        from vllm.exceptions import VLLMClientError

        if self._closed:
            raise EngineError(_SHUT_DOWN)
        config = self._llm.vllm_config
        verify = _sampling_params(sampling).verify
        try:
            # This runs in a thread: vLLM compiles the schema's grammar to validate it.
            await asyncio.to_thread(
                verify,
                config.model_config,
                config.speculative_config,
                config.structured_outputs_config,
                self._llm.get_tokenizer(),
            )
        except (VLLMClientError, ValueError) as error:
            raise ConfigurationError(f"vLLM refuses the request: {error}") from error

    async def _first_output(self, outputs: AsyncGenerator[Any, None]) -> Any:
        """Await the first output in a task that `close` can cancel: until then vLLM may not know the request."""
        start = asyncio.ensure_future(anext(outputs, None))
        self._starting.add(start)
        try:
            return await start
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise EngineError(_SHUT_DOWN) from None
        finally:
            self._starting.discard(start)

    def close(self) -> None:
        """Shut vLLM down and make sure that its processes have ended."""
        if self._closed:
            return
        with self._state_lock:
            self._closed = True
            unfinished = self._unfinished
        if unfinished is not None:  # a restart, which then ends its processes and fails
            unfinished.finish_start(failed=True)
        try:
            if self._loop is not None and self._loop.is_running():
                stopped = asyncio.run_coroutine_threadsafe(self._cancel_requests(self._llm), self._loop)
                if threading.current_thread() is not self._loop_thread:
                    wait([stopped], timeout=2.0)
            self._llm.shutdown()
        finally:
            processes.end_processes(self.processes)
            _disable_shutdown(self._llm)  # a task or a traceback may hold it until interpreter exit
            self._llm = None

    def detach_after_fork(self) -> None:
        """Mark the engine closed in a forked child without signalling vLLM's processes, which belong to the parent."""
        self._closed = True
        self._llm.engine_core._finalizer.detach()
        _disable_shutdown(self._llm)

    async def _cancel_requests(self, llm: Any) -> None:
        """Cancel all requests and vLLM's output reader, which would report the shutdown as a crash."""
        llm.output_processor.abort_requests(list(self._running), internal=False)
        reader: asyncio.Task[None] | None = llm.output_handler
        tasks = {*self._starting, *([reader] if reader is not None else [])}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _job(config: VLLMConfig, shared_draft: SharedDraftBuffer | None, worker_cores: list[int]) -> dict[str, Any]:
    """The arguments of `worker_main`."""
    arguments = vllm_config.engine_arguments(config)
    if worker_cores:
        arguments["distributed_executor_backend"] = IN_ONE_PROCESS
    if shared_draft is not None:
        arguments["additional_config"] = {**arguments.get("additional_config", {}), BUFFER: str(shared_draft.path)}
    return {
        "arguments": arguments,
        "on_cpu": vllm_config.runs_on_cpu(),
        "variables": vllm_config.engine_environment(config),
        "worker_cores": worker_cores,
    }


def _proposals(metrics: Any) -> tuple[int, int] | None:
    """The proposed and the accepted draft tokens of vLLM's figures, which the last output of a request has."""
    if metrics is None:
        return None
    counts = metrics.to_dict()
    return counts["num_draft_tokens"], counts["num_accepted_draft_tokens"]


def _disable_shutdown(llm: Any) -> None:
    """Make vLLM's destructor do nothing: at interpreter exit it no longer finds the functions that it calls."""
    llm.shutdown = lambda *_, **__: None


def _import_vllm() -> None:
    """Import vLLM's client. It logs errors only, to stderr, unless the user's variables say otherwise."""
    from vllm import envs

    # vLLM reads its variables as attributes of this module: `os.environ` belongs to the program.
    for name in ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM"):
        if name not in os.environ:
            setattr(envs, name, processes.QUIET_VARIABLES[name])
    logger = logging.getLogger("vllm")
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        logger.setLevel(logging.ERROR)
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: F401


def _connect(process: EngineProcess) -> Any:
    """Create vLLM's client of a started engine, which watches and ends the engine's process."""
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_vllm_config(**process.wait_until_started())
    client = llm.engine_core
    client.resources.engine_manager = process
    client.start_engine_core_monitor()
    return llm


def _sampling_params(sampling: Sampling) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop=list(sampling.stop) or None,
        logprobs=sampling.logprobs,
        prompt_logprobs=0 if sampling.prompt_logprobs else None,
        allowed_token_ids=list(sampling.allowed_token_ids) if sampling.allowed_token_ids else None,
        structured_outputs=_structured_outputs(sampling.structured),
        # The decoder detokenizes itself; vLLM needs text only for stop strings.
        detokenize=bool(sampling.stop),
        extra_args=None if sampling.drafted else {NO_DRAFT: True},
        output_kind=RequestOutputKind.DELTA,
    )


def _structured_outputs(structured: Mapping[str, Any] | None) -> Any:
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output.backend_guidance import process_for_additional_properties

    if structured is None:
        return None
    if not isinstance(schema := structured.get("json"), dict):
        return StructuredOutputsParams(**structured)
    schema = for_llguidance(schema)
    if not composes(schema):
        # Undeclared properties are seldom wanted, and a small model generates them without end.
        schema = process_for_additional_properties(schema)
    return StructuredOutputsParams(json=schema)
