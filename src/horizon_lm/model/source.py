"""Opening a model that is named by a folder or a hub id."""

import difflib
import json
import re
from pathlib import Path
from typing import Any

from horizon_lm.errors import ConfigError, ModelNotSupportedError, first_line
from horizon_lm.model.finite import require_finite
from horizon_lm.model.skeleton import build_skeleton
from horizon_lm.plan.known import KnownModel, find_known, known_models

_PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.jinja", "tokenizer*", "*.model")


def local_folder(name: str | Path, **download: Any) -> Path:
    """Return the folder of a model: itself, or a hub snapshot (downloaded if need be).

    Args:
        name: a folder or hub id.
        download: ``revision``, ``cache_dir``, ``token`` and the like, as huggingface_hub takes them.

    Raises:
        ConfigError: neither a folder nor a hub id that can be reached.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    _require_hub_id(str(name))
    typed, name = str(name), full_name(str(name))
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_PATTERNS), **download))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise _not_found(typed, name, error) from error


def folder_here(name: str | Path) -> Path | None:
    """Return the folder of a model whose weights are on this machine; None if they would have to be downloaded."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import try_to_load_from_cache

    hub_id = full_name(str(name))
    config = try_to_load_from_cache(hub_id, "config.json") if is_cached(hub_id) else None
    return Path(config).parent if isinstance(config, str) else None


def _require_hub_id(name: str) -> None:
    """ConfigError for what can only be a path."""
    if Path(name).expanduser().exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"model_name_or_path: {name} is not a folder")


def _not_found(typed: str, hub_id: str, error: Exception) -> ConfigError:
    known = f" as {hub_id}" if hub_id != typed else ""
    close = difflib.get_close_matches(
        typed, [name for each in known_models() for name in (each.name, *each.aliases)], n=1
    )
    hint = f"; did you mean {close[0]}?" if close and close[0] not in (typed, hub_id) else ""
    return ConfigError(
        f"model_name_or_path: {typed} is neither a folder here nor a model that could be fetched from the hub{known} "
        f"({first_line(error)}){hint}"
    )


def load_config(folder: Path, trust_remote_code: bool, gguf_file: str | None = None) -> Any:
    """The Hugging Face config of a folder; ConfigError if there is none, ModelNotSupportedError if not a causal LM.

    Args:
        gguf_file: the file in it to read instead of config.json.
    """
    from transformers import AutoConfig

    options = {"gguf_file": gguf_file} if gguf_file is not None else {}
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder}: no usable {gguf_file or 'config.json'} ({first_line(error)})") from error
    return _require_causal(config, str(folder))


def fetch_config(name: str, trust_remote_code: bool) -> Any:
    """The config of a hub id, fetched without its weights; errors as in `load_config`."""
    from transformers import AutoConfig

    _require_hub_id(name)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise _not_found(name, name, error) from error
    return _require_causal(config, name)


def known_config(known: KnownModel) -> Any:
    """The config of a published model; nothing is fetched."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**known.config)


def full_name(name: str) -> str:
    """The hub id that a name stands for: itself, or that of a published model whose organization was left out."""
    known = find_known(name)
    if known is None or "/" in name:
        return name.partition(" ")[0]  # what is known as "... (text)" is a part of that model
    names = (known.name, *known.aliases)
    return next(each for each in names if each.rpartition("/")[2].casefold() == name.casefold()).partition(" ")[0]


def is_cached(name: str) -> bool:
    """Whether all weights of a hub id are on this machine."""
    from huggingface_hub import try_to_load_from_cache

    def find(file: str) -> str | None:
        found = try_to_load_from_cache(name, file)
        return found if isinstance(found, str) else None

    if find("model.safetensors") is not None:
        return True
    index = find("model.safetensors.index.json")
    if index is None:
        return False
    files = set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values())
    return all(find(file) is not None for file in files)


def config_bytes(config: Any) -> int:
    """Bytes of an element of a checkpoint, as its config says; fp32 where it does not, as in old repositories."""
    import torch

    dtype = getattr(config.get_text_config(), "dtype", None)
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    return dtype.itemsize if isinstance(dtype, torch.dtype) else 4


def stored_bytes(folder: Path, config: Any) -> int:
    """Bytes of an element of the checkpoint in a folder: of its first floating-point tensor."""
    from safetensors import SafetensorError, safe_open

    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (not a dict)
                    kind = tensors.get_slice(name).get_dtype()
                    if kind in ("F64", "F32", "F16", "BF16"):
                        return int(re.sub(r"\D", "", kind)) // 8
    except (OSError, SafetensorError):  # whoever reads the weights will say so
        pass
    return config_bytes(config)


def _require_causal(config: Any, place: str) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if getattr(config, "quantization_config", None):
        raise ModelNotSupportedError(
            f"{place}: its weights are quantized, and quantized weights cannot be trained; take a copy of the model in bf16"
        )
    auto_map = getattr(config, "auto_map", None) or {}
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in auto_map:
        raise ModelNotSupportedError(
            f"{place}: {config.model_type!r} has no causal language model in transformers; Horizon-LM trains decoders"
        )
    return config


def skeleton_of(config: Any, place: str, **options: Any) -> Any:
    """The model that a config describes, without weights; ConfigError if it cannot be built. ``place``: of the config."""
    try:
        return build_skeleton(config, **{k: v for k, v in options.items() if v is not None})
    except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        attention = options.get("attn_implementation")
        if attention is not None and isinstance(error, ImportError):  # a kernel that is not installed
            raise ConfigError(
                f"attn_implementation: {attention} cannot be used here ({first_line(error)}); choose sdpa, or varlen, which "
                "needs no package"
            ) from error
        raise ConfigError(
            f"{place}: transformers cannot build this model ({first_line(error)}); mend its config.json, or the setting "
            "that is named"
        ) from error


def open_skeleton(folder: Path, config: Any, **options: Any) -> Any:
    """The model of a folder without its weights, with its generation config; ConfigError if it cannot be built."""
    from transformers import GenerationConfig

    model = skeleton_of(config, str(folder), **options)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def load_gguf(folder: Path, gguf_file: str) -> Any:
    """A GGUF model as transformers opens it: dequantized, whole in memory. To be converted once, not trained from."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    if not (folder / gguf_file).is_file():
        raise ConfigError(f"gguf_file: {folder / gguf_file} is missing")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=gguf_file, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
    except (ImportError, ValueError, KeyError, OSError) as error:
        raise ConfigError(
            f"gguf_file: {folder / gguf_file} cannot be opened ({first_line(error)}). It needs pip install "
            "gguf accelerate (or the extra gguf), and an architecture that transformers reads from GGUF"
        ) from error
    for name, parameter in model.named_parameters():
        require_finite(name, parameter.data, folder / gguf_file)
    return model
