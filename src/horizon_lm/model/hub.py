"""Find a model by folder or hub id: its folder on this machine, or its config on the hub."""

import json
from pathlib import Path
from typing import Any

from horizon_lm.common.near_misses import closest_model
from horizon_lm.common.paths import exists, may_be_on_hub, near_path, similar_path
from horizon_lm.errors import ConfigError, first_line
from horizon_lm.model.folder import PATTERNS, code_remedy
from horizon_lm.model.known_models import find_known, full_name, known_models


def local_folder(name: str | Path, **download: Any) -> Path:
    """Return the folder of a model: a local folder, or a hub snapshot, which is downloaded if needed.

    Args:
        name: folder or hub id.
        download: further arguments for huggingface_hub, such as ``revision``, ``cache_dir`` and ``token``.

    Raises:
        ConfigError: the name is neither a folder nor a hub id that can be fetched.
    """
    if exists(str(name)) and (path := Path(name).expanduser()).is_dir():
        return path
    _require_hub_id(str(name))
    hub_id = full_name(str(name))
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(PATTERNS), **download))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise _not_found(str(name), hub_id, error) from error


def folder_here(name: str | Path) -> Path | None:
    """Return the folder of a model's weights on this machine, or None if they would have to be downloaded."""
    if exists(str(name)) and (path := Path(name).expanduser()).is_dir():
        return path
    if find_known(str(name)) is None and not may_be_on_hub(str(name)):
        return None
    from huggingface_hub import try_to_load_from_cache

    hub_id = full_name(str(name))
    if not _is_cached(hub_id):
        return None
    config = try_to_load_from_cache(hub_id, "config.json")  # a path, if it is a text
    return Path(config).parent if isinstance(config, str) else None


def _is_cached(name: str) -> bool:
    """Return whether all weights of a hub id are in the hub's cache on this machine."""
    from huggingface_hub import try_to_load_from_cache

    def find(file: str) -> str | None:
        found = try_to_load_from_cache(name, file)
        return found if isinstance(found, str) else None

    if find("model.safetensors") is not None:
        return True
    index = find("model.safetensors.index.json")
    if index is None:
        return False
    try:
        files = set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values())
        return all(find(file) is not None for file in files)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # damaged: to be fetched again
        return False


def fetch_config(name: str, trust_remote_code: bool) -> Any:
    """Return the config of a hub id, fetched without the weights. Raises the same errors as `load_config`."""
    from transformers import AutoConfig

    from horizon_lm.model.hf_config import auto_class, require_model

    _require_hub_id(name)
    _ask_hub(name)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # the network, the hub, or transformers' parsers
        raise _not_found(name, name, error) from error
    return require_model(config, name, auto_class(None, config))


def require_on_hub(name: str) -> None:
    """Raise ConfigError if a hub id is not in the cache, and the hub does not know it or does not answer. Nothing heavy is imported."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    error = _ask_hub(name)
    if isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError):
        raise _not_found(name, name, error) from error


def _ask_hub(name: str) -> Exception | None:
    """Ask the hub for a config, and return the error with which it rejects the name; None if the config is there, or in the cache.

    Raises:
        ConfigError: the hub does not answer. transformers would try for most of a minute.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(try_to_load_from_cache(name, "config.json"), str):  # its path
        return None
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except HfHubHTTPError as error:  # an answer, of which transformers knows the meaning
        return error
    except Exception as error:  # no network, or the hub is switched off
        raise _not_found(name, name, error) from error
    return None


def _require_hub_id(name: str) -> None:
    """Raise ConfigError if the name can only be a path, so that the hub is not asked for it."""
    if find_known(name) is None and not may_be_on_hub(name):
        raise ConfigError(f"{name} is not a folder{_did_you_mean(name) or near_path(name)}")


def _not_found(typed: str, hub_id: str, error: Exception) -> ConfigError:
    """Return the error for a name that is neither a folder nor a model on the hub.

    Args:
        typed: the name, as the user has typed it.
        hub_id: the hub id that it stands for.
        error: the error of the request to the hub.
    """
    # At most one of these three parts of the message has a text.
    resolved = f" as {hub_id}" if hub_id != typed else ""
    meant = "" if resolved else _did_you_mean(typed)
    listed = "" if resolved or meant else _list_of_names(typed)
    return ConfigError(
        f"{typed} is neither a folder nor a model that could be fetched from the hub{resolved}{meant} "
        f"({_reason(error)}){listed}{code_remedy(error)}"
    )


def _did_you_mean(typed: str) -> str:
    """Return the end of an error message that names a known model with a similar name, or else a similar path; empty without either."""
    close = closest_model(typed, (name for each in known_models() for name in (each.name, *each.aliases)))
    if close and close != typed:
        return f"; did you mean {close}?"
    return similar_path(typed)


def _list_of_names(typed: str) -> str:
    """Return the hint at the names of known models, for a name without an organization; empty for others."""
    return "" if "/" in typed else "; horizon-lm plan --list lists the models that are known by name"


def _reason(error: Exception) -> str:
    """Return the reason why the hub has sent no model. huggingface_hub wraps the error of a whole model, and not that of one file."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) and error.__cause__ else error
    return "HF_HUB_OFFLINE is set" if isinstance(cause, OfflineModeIsEnabled) else first_line(cause)
