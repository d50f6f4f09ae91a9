"""The GPUs of each engine, and the division of a shared GPU's memory between engines, by vLLM's own arithmetic."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lookahead_agent.engines.model_files import read_config, read_count, read_object_in
from lookahead_agent.engines.vllm_config import read_trained_context
from lookahead_agent.errors import ConfigurationError

Role = TypeVar("Role", bound=str)
PlannedEngine = tuple[Path, Mapping[str, Any]]  # an engine's folder and arguments
Placement = Mapping[str, Sequence[int]]  # GPUs of each engine, by role, as indices among the visible ones

USABLE = 0.92  # share of the memory for all engines together: vLLM's default for one
MIN_CONTEXT = 16384  # tokens of context below which an explanation says how to get more
PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_OVERHEAD = 5 << 29  # bytes per engine besides weights and cache: activations, CUDA graphs, CUDA's context
_BLOCK = 16  # tokens of a block of vLLM's KV cache, which keeps one block back
_JUDGE_TOKENS = 16384  # cached tokens of a judge: it reads pairs of steps
_SHARE = "gpu_memory_utilization"
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
_MORE_ROOM = {
    "fp8 weights (engine_args={'quantization': 'fp8'})": {"quantization": "fp8"},
    "an fp8 cache ({'kv_cache_dtype': 'fp8'})": {"kv_cache_dtype": "fp8"},
    "both": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}
"""Engine arguments that make room, by their names in explanations."""


def count_gpus(arguments: Mapping[str, Any]) -> int:
    """The number of GPUs that an engine with these arguments needs."""
    sizes = [int(arguments.get(size, 1)) for size in PARALLEL_SIZES]
    return sizes[0] * sizes[1] * sizes[2]


def visible_gpus() -> list[int]:
    """Bytes of each GPU that vLLM can use."""
    from vllm.platforms import current_platform

    try:
        return [int(current_platform.get_device_total_memory(gpu)) for gpu in range(current_platform.device_count())]
    except NotImplementedError:  # another accelerator
        return []


def parse_gpus(text: str, role: str) -> list[int]:
    """The indices in a text such as "0,1"; raises ConfigurationError for anything else, or a GPU named twice."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and part.isascii() for part in parts) or len(set(map(int, parts))) < len(parts):
        raise ConfigurationError(
            f"gpus[{role!r}] is {text!r}: give the numbers of the GPUs, each once, such as '0' or '0,1'"
        )
    return [int(part) for part in parts]


def fill_parallel_size(arguments: Mapping[str, Any], gpus: str | None, role: str) -> dict[str, Any]:
    """An engine's arguments with tensor parallelism on the GPUs that are given for it; None: as they are.

    Raises ConfigurationError if the arguments need another number of GPUs.
    """
    if gpus is None:
        return dict(arguments)
    given = len(parse_gpus(gpus, role))
    if not arguments.keys() & set(PARALLEL_SIZES):
        return {**arguments, PARALLEL_SIZES[0]: given} if given > 1 else dict(arguments)
    if (needed := count_gpus(arguments)) != given:
        raise ConfigurationError(f"gpus[{role!r}] is {gpus!r}, and the engine's arguments need {needed} GPUs")
    return dict(arguments)


def place_engines(
    arguments: Mapping[str, Mapping[str, Any]], gpus: Mapping[str, str], visible: int
) -> dict[str, list[int]]:
    """Place engines, by role, on `visible` GPUs: as `gpus` says, else each on GPUs of its own while there are any left.

    An engine without a GPU of its own shares one: the judge the draft's, the draft the target's first. Raises
    ConfigurationError if `gpus` names a GPU that is not there.
    """
    placed = {role: parse_gpus(gpus[role], role) for role in arguments if role in gpus}
    for role, numbers in placed.items():
        if numbers and max(numbers) >= visible:
            raise ConfigurationError(f"gpus[{role!r}] names GPU {max(numbers)}, and {visible} are visible")
    for role in ("target", "draft", "judge"):
        if role not in arguments or role in placed:
            continue
        needed = count_gpus(arguments[role])
        taken = {number for numbers in placed.values() for number in numbers}
        free = [number for number in range(visible) if number not in taken]
        shared = placed.get("draft", placed.get("target", [0])) if role == "judge" else placed.get("target", [])
        if len(free) >= needed:
            placed[role] = free[:needed]
        else:  # vLLM refuses more GPUs than there are
            placed[role] = [*shared, *free, *(number for number in range(needed) if number not in shared)][:needed]
    return placed


def visible_devices(numbers: Sequence[int], visible: str | None) -> str:
    """`CUDA_VISIBLE_DEVICES` of an engine on these GPUs of the `visible` ones, this process's own value."""
    names = [name.strip() for name in visible.split(",")] if visible else []
    return ",".join(names[number] if number < len(names) else str(number) for number in numbers)


@dataclass(frozen=True)
class MemoryPlan:
    """The division of GPUs between engines."""

    shares: Mapping[str, float]  # `gpu_memory_utilization` of engines that share a GPU, by role
    room: int = 0  # tokens of context for which the target and the engines on its GPU have room
    explanation: str = ""  # what shares the target's GPU, and what would make more room


def plan_memory(engines: Mapping[str, PlannedEngine], placement: Placement, totals: Sequence[int]) -> MemoryPlan:
    """Divide GPUs of `totals` bytes between engines, by role.

    Raises ConfigurationError if engines on one GPU do not fit there with any context.
    """
    shares: dict[str, float] = {}
    room, explanations = 0, []
    for roles in _groups(placement):
        group = {role: engines[role] for role in roles}
        # Further GPUs of the target may be those of other nodes.
        total = min(totals[number] for role in roles for number in placement[role] if number < len(totals))
        if len(group) > 1:
            shares |= memory_shares(group, total)
        if "target" in group:
            room = context_that_fits(group, total)
        if len(group) == 1 and len(engines) > 1:
            explanations.append(f"the {roles[0]} has GPU {', '.join(map(str, placement[roles[0]]))} of its own")
        elif "target" in group and (len(group) > 1 or not has_much_room(group, total)):
            explanations.append(explain_room(group, total))
    return MemoryPlan(shares, room, "; ".join(explanations))


def _groups(placement: Placement) -> Iterator[list[str]]:
    """The roles of engines that share GPUs, directly or by an engine between them."""
    left = dict(placement)
    while left:
        role = next(iter(left))
        numbers = left.pop(role)
        roles, used = [role], set(numbers)
        while more := [other for other, theirs in left.items() if used & set(theirs)]:
            for other in more:
                used |= set(left.pop(other))
                roles.append(other)
        yield [role for role in placement if role in roles]


def memory_shares(
    engines: Mapping[Role, PlannedEngine], total: int | None = None, usable: float = USABLE
) -> dict[Role, float]:
    """The `gpu_memory_utilization` by role of engines, each a folder and arguments, that share a GPU of `total` bytes.

    A share in an engine's arguments is kept. Raises ConfigurationError if the weights alone do not fit.
    """
    total = visible_gpus()[0] if total is None else total
    shares = {role: arguments[_SHARE] for role, (_, arguments) in engines.items() if _SHARE in arguments}
    free = {role: engine for role, engine in engines.items() if role not in shares}
    fixed, cache = _needs(free)
    rest = total * (usable - sum(shares.values())) - sum(fixed.values())
    if free and (rest <= 0 or (cache and rest < _BLOCK * sum(cache.values()))):
        sizes = ", ".join(f"{role} {size / 2**30:.1f} GiB" for role, size in fixed.items())
        ways = "" if shares else explain_ways({str(role): engine for role, engine in engines.items()}, total)
        raise ConfigurationError(
            f"the models do not fit into the GPU's {total / 2**30:.0f} GiB together ({sizes} before any cache): "
            f"choose a smaller or quantized model, more GPUs (engine_args={{'tensor_parallel_size': …}}), or a server"
            + (f". More room: {ways}" if ways else "")
        )
    per_token = sum(cache.values()) or 1
    return {role: round((fixed[role] + rest * cache.get(role, 0) / per_token) / total, 4) for role in free} | shares


def _needs(engines: Mapping[Role, PlannedEngine]) -> tuple[dict[Role, int], dict[Role, int]]:
    """Bytes of each engine whatever the context, and bytes for each token of it; a judge's cache has a fixed size."""
    fixed = {role: weight_bytes(*engine) + _OVERHEAD for role, engine in engines.items()}
    cache = {role: kv_cache_bytes_per_token(*engine) for role, engine in engines.items()}
    for role in [role for role in cache if role == "judge"]:
        fixed[role] += _JUDGE_TOKENS * cache.pop(role)
    return fixed, cache


def context_that_fits(engines: Mapping[str, PlannedEngine], total: int) -> int:
    """Tokens of context, in whole blocks, for which engines on a GPU of `total` bytes have room; 0 if none."""
    fixed, cache = _needs(engines)
    rest = total * USABLE - sum(fixed.values())
    blocks = int(rest) // (_BLOCK * sum(cache.values())) - 1
    return max(blocks, 0) * _BLOCK


def has_much_room(engines: Mapping[str, PlannedEngine], total: int) -> bool:
    """Whether a GPU of `total` bytes has room for a context that nobody needs to have explained."""
    wanted = _requested_context(engines) or min(MIN_CONTEXT, read_trained_context(engines["target"][0]))
    return context_that_fits(engines, total) >= wanted


def _requested_context(engines: Mapping[str, PlannedEngine]) -> int:
    """The target's `max_model_len`; 0 if the longest context that fits is wanted."""
    requested = engines["target"][1].get("max_model_len")
    return max(requested, 0) if isinstance(requested, int) else 0


def explain_room(engines: Mapping[str, PlannedEngine], total: int) -> str:
    """For how many tokens engines share a GPU of `total` bytes; if they are few, also how to get more."""
    room = context_that_fits(engines, total)
    having = "share" if len(engines) > 1 else "has"
    size = f"{total / 2**30:.0f} GiB"
    found = f"{' and '.join(engines)} {having} a GPU of {size} with room for {room} tokens of context"
    if has_much_room(engines, total):
        return found
    return f"{found}; more room: {explain_ways(engines, total)}"


def explain_ways(engines: Mapping[str, PlannedEngine], total: int) -> str:
    """Ways to make room on a GPU of `total` bytes for the target and the engines beside it, with the tokens."""
    tokens = {
        name: context_that_fits(
            {role: (folder, {**given, **more}) for role, (folder, given) in engines.items()},
            total,
        )
        for name, more in _MORE_ROOM.items()
    }
    target = {role: engine for role, engine in engines.items() if role == "target"}
    if target and _requested_context(engines) > (room := context_that_fits(engines, total)):
        tokens[f"a shorter context ({{'max_model_len': {room}}})"] = room
    if len(engines) > 1:
        tokens["a second GPU, or the target alone,"] = context_that_fits(target, total)
    sharded = {
        role: (folder, {**given, PARALLEL_SIZES[0]: 2 * _size(given, 0)}) for role, (folder, given) in target.items()
    }
    if target:
        name = f"the target on twice the GPUs ({{'{PARALLEL_SIZES[0]}': {sharded['target'][1][PARALLEL_SIZES[0]]}}})"
        tokens[name] = context_that_fits(sharded, total)
    trained = read_trained_context(target["target"][0]) if target else 0
    return ", ".join(
        f"{name} {min(count, trained) if trained else count} tokens" for name, count in tokens.items() if count > 0
    )


def weight_bytes(folder: Path, arguments: Mapping[str, Any]) -> int:
    """Bytes of an engine's weights on each of its GPUs: of the files, or of the shape if there are none to load."""
    sizes = (sum(file.stat().st_size for file in folder.glob(kind)) for kind in _WEIGHT_FILES)
    size = next(filter(None, sizes), 0)
    if not size or arguments.get("load_format") == "dummy":
        size = 2 * _parameter_count(_text_config(folder))
    if arguments.get("quantization") == "fp8" and not read_config(folder).get("quantization_config"):
        size -= _layer_parameters(_text_config(folder))  # vLLM quantizes the layers, and neither embedding nor head
    draft_bytes = sum(weight_bytes(draft, {}) for draft in _draft_folders(arguments))
    return size // (_size(arguments, 0) * _size(arguments, 1)) + draft_bytes


def kv_cache_bytes_per_token(folder: Path, arguments: Mapping[str, Any]) -> int:
    """Bytes per token of an engine's keys and values on each of its GPUs."""
    config = _text_config(folder)
    # As in vLLM, a GPU has one head at least.
    heads = max(1, read_count(config, "num_key_value_heads", "num_attention_heads") // _size(arguments, 0))
    layers = -(-read_count(config, "num_hidden_layers") // _size(arguments, 1))
    cache = str(arguments.get("kv_cache_dtype", "auto"))
    dtype = str(arguments.get("dtype", "auto")) if cache == "auto" else cache
    # By itself, vLLM computes with 32-bit weights in 16 bits.
    value_bytes = 4 if dtype in ("float32", "float") else 1 if dtype.startswith("fp8") else 2
    draft_bytes = sum(kv_cache_bytes_per_token(draft, {}) for draft in _draft_folders(arguments))
    return 2 * layers * heads * _head_size(config) * value_bytes + draft_bytes


def _size(arguments: Mapping[str, Any], number: int) -> int:
    return int(arguments.get(PARALLEL_SIZES[number], 1))


def _draft_folders(arguments: Mapping[str, Any]) -> list[Path]:
    """The folder of the draft model or head inside the engine, if it has one."""
    folder = Path(str((arguments.get("speculative_config") or {}).get("model", "")))
    return [folder] if (folder / "config.json").is_file() else []


def _text_config(folder: Path) -> dict[str, Any]:
    config = read_config(folder)
    return read_object_in(config, "text_config") or read_object_in(config, "transformer_layer_config") or config


def _head_size(config: Mapping[str, Any]) -> int:
    if config.get("head_dim") is not None:
        return read_count(config, "head_dim")
    return read_count(config, "hidden_size") // read_count(config, "num_attention_heads")


def _layer_parameters(config: Mapping[str, Any]) -> int:
    """The number of weights in the layers of a dense decoder."""
    hidden, heads = read_count(config, "hidden_size"), read_count(config, "num_attention_heads")
    kv_heads = read_count(config, "num_key_value_heads", "num_attention_heads")
    attention = 2 * hidden * _head_size(config) * (heads + kv_heads)
    return read_count(config, "num_hidden_layers") * (attention + 3 * hidden * read_count(config, "intermediate_size"))


def _parameter_count(config: Mapping[str, Any]) -> int:
    """The number of weights of a dense decoder."""
    embeddings = read_count(config, "hidden_size") * read_count(config, "vocab_size")
    return _layer_parameters(config) + embeddings * (1 if config.get("tie_word_embeddings") else 2)
