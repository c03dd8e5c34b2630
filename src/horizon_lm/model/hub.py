"""Open a model by folder or hub id: its config, and a skeleton whose parameters are on the meta device."""

import itertools
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from horizon_lm.errors import CheckpointWarning, ConfigError, HorizonError, ModelNotSupportedError, first_line, warn
from horizon_lm.model.config_limits import (
    num_elements,
    require_few_parameters,
    require_sane_config,
    require_small_buffer,
)
from horizon_lm.model.gguf_header import read_gguf_header
from horizon_lm.model.known_models import KnownModel, find_known, known_models
from horizon_lm.model.opening import open_like_transformers
from horizon_lm.model.own_head import has_own_head
from horizon_lm.model.quantization import matrix_codec, quantization_of
from horizon_lm.model.tying import declare_untied
from horizon_lm.near_misses import closest_model
from horizon_lm.paths import exists, may_be_on_hub, require_inside, require_own_files, require_regular

_PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.jinja", "tokenizer*", "*.model", "*.py")
_ALSO_READ = ("*.gguf", "additional_chat_templates", "additional_chat_templates/*")  # in a local folder


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
    typed, name = str(name), full_name(str(name))
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_PATTERNS), **download))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise _not_found(typed, name, error) from error


def folder_here(name: str | Path) -> Path | None:
    """Return the folder of a model's weights on this machine, or None if they would have to be downloaded."""
    if exists(str(name)) and (path := Path(name).expanduser()).is_dir():
        return path
    if find_known(str(name)) is None and not may_be_on_hub(str(name)):
        return None
    from huggingface_hub import try_to_load_from_cache

    hub_id = full_name(str(name))
    config = try_to_load_from_cache(hub_id, "config.json") if is_cached(hub_id) else None
    return Path(config).parent if isinstance(config, str) else None


def _require_hub_id(name: str) -> None:
    """Raise ConfigError if the name can only be a path, so that the hub is not asked for it."""
    if find_known(name) is None and not may_be_on_hub(name):
        raise ConfigError(f"{name} is not a folder")


def _not_found(typed: str, hub_id: str, error: Exception) -> ConfigError:
    """Return the error for a name that is no folder and not on the hub, with a known model of a similar name."""
    known = f" as {hub_id}" if hub_id != typed else ""
    close = closest_model(typed, (name for each in known_models() for name in (each.name, *each.aliases)))
    hint = f"; did you mean {close}?" if close and close not in (typed, hub_id) else ""
    return ConfigError(
        f"{typed} is neither a folder nor a model that could be fetched from the hub{known} "
        f"({first_line(error)}){hint}{code_remedy(error)}"
    )


def load_config(folder: Path, trust_remote_code: bool, gguf_file: str | None = None, model_class: Any = None) -> Any:
    """Return the Hugging Face config in a folder.

    Args:
        folder: folder of the model.
        trust_remote_code: run code of the folder, if its config asks for it.
        gguf_file: file in the folder to read instead of config.json.
        model_class: the class that the config must have a model of, as in `auto_class`.

    Raises:
        ConfigError: there is no usable config, or a file of the model is not safe to read.
        ModelNotSupportedError: the config has no model of this class.
    """
    kind = auto_class(model_class)
    config = require_model(read_config(folder, trust_remote_code, gguf_file), str(folder), kind)
    if gguf_file is None and has_own_head(folder, config, kind):
        declare_untied(config)
        warn(
            f"{folder}: config.json says tie_word_embeddings: true, but the folder has a head of its own, which is kept, as in transformers; "
            "set it to false",
            CheckpointWarning,
        )
    return config


def read_config(folder: Path, trust_remote_code: bool, gguf_file: str | None = None) -> Any:
    """Return the config in a folder, of any kind of model. Arguments as in `load_config`; raises ConfigError, too."""
    from transformers import AutoConfig

    require_model_files(folder)
    options: dict[str, Any] = {}
    if gguf_file is not None:
        read_gguf_header(gguf_path(folder, gguf_file))
        options["gguf_file"] = gguf_file
    else:
        require_sane_config(folder / "config.json")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, **options)
    except Exception as error:  # transformers' parsers raise anything
        raise ConfigError(
            f"{folder}: no usable {gguf_file or 'config.json'} ({first_line(error)}){code_remedy(error) or gguf_remedy(folder)}"
        ) from error


def code_remedy(error: Exception) -> str:
    """Return the remedy for a model whose code transformers may not run; empty for other errors."""
    if "trust_remote_code" not in str(error):
        return ""
    return "; if you trust the code, allow it with trust_remote_code: true (--trust-remote-code)"


def gguf_remedy(folder: Path) -> str:
    """Return the remedy for a folder that has its model in a GGUF file alone, which is read by name; empty for others."""
    files = [] if (folder / "config.json").exists() else sorted(folder.glob("*.gguf"))
    return (
        f"; read it from {files[0].name} with gguf_file: {files[0].name} (--gguf-file {files[0].name})" if files else ""
    )


def require_model_files(folder: Path) -> None:
    """Raise ConfigError if a file that a model may be read from leads out of its folder, or is a pipe or a device."""
    require_own_files(folder, (*_PATTERNS, *_ALSO_READ))


def gguf_path(folder: Path, gguf_file: str) -> Path:
    """Return the path of a GGUF file; raise ConfigError if it is missing or outside the folder."""
    path = folder / gguf_file
    require_regular(path)
    if not path.is_file():
        raise ConfigError(f"gguf_file: {path} is missing")
    require_inside(path, folder)
    return path


def fetch_config(name: str, trust_remote_code: bool) -> Any:
    """Return the config of a hub id, fetched without the weights. Raises the same errors as `load_config`."""
    from transformers import AutoConfig

    _require_hub_id(name)
    _require_answer(name)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # the network, the hub, or transformers' parsers
        raise _not_found(name, name, error) from error
    return require_model(config, name, auto_class(None))


def _require_answer(name: str) -> None:
    """Raise ConfigError if the hub cannot be reached and is needed. transformers would try for most of a minute."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except HfHubHTTPError:  # an answer, of which transformers knows the meaning
        return
    except Exception as error:  # no network, or the hub is switched off
        raise _not_found(name, name, error) from error


def known_config(known: KnownModel) -> Any:
    """Return the config of a known model without downloading anything."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**known.config)


def full_name(name: str) -> str:
    """Return the hub id for a name, which may omit the organization of a known model."""
    known = find_known(name)
    if known is None or "/" in name:
        return name.partition(" ")[0]  # "... (text)" denotes a part of that model
    names = [each.partition(" ")[0] for each in (known.name, *known.aliases)]
    wanted = name.partition(" ")[0].casefold()
    return next(each for each in names if each.rpartition("/")[2].casefold() == wanted)


def is_cached(name: str) -> bool:
    """Return whether all weights of a hub id are on this machine."""
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


def config_bytes(config: Any) -> int:
    """Return the bytes per element of a checkpoint, taken from its config; old configs without a dtype mean fp32."""
    import torch

    dtype = getattr(config.get_text_config(), "dtype", None)
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    return dtype.itemsize if isinstance(dtype, torch.dtype) else 4


def stored_bytes(folder: Path, config: Any) -> int:
    """Return the bytes per element of the checkpoint in a folder, taken from its first floating-point tensor."""
    from safetensors import SafetensorError, safe_open

    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (not a dict)
                    kind = tensors.get_slice(name).get_dtype()
                    if kind in ("F64", "F32", "F16", "BF16"):
                        return int(re.sub(r"\D", "", kind)) // 8
    except (OSError, SafetensorError):  # the error is raised when the weights are read
        pass
    return config_bytes(config)


def auto_class(model_class: Any) -> Any:
    """Return the class of transformers that builds a model: AutoModelForCausalLM for None.

    Raises:
        ConfigError: models of this class are not read from a folder.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    if model_class not in (None, AutoModelForCausalLM, AutoModelForSequenceClassification):
        raise ConfigError(
            f"model_class is {getattr(model_class, '__name__', model_class)}; use AutoModelForCausalLM or "
            "AutoModelForSequenceClassification, or load the model with transformers and stream() it"
        )
    return model_class or AutoModelForCausalLM


def saved_class(config: Any) -> Any:
    """Return the class, as in `auto_class`, of the model that a config was saved with."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    return AutoModelForSequenceClassification if _names_classifier(config) else AutoModelForCausalLM


def _names_classifier(config: Any) -> str:
    """Return the sequence classification model among the architectures of a config; empty if there is none."""
    names = config.architectures if isinstance(config.architectures, list) else []
    return next((name for name in map(str, names) if name.endswith("ForSequenceClassification")), "")


def require_model(config: Any, place: str, model_class: Any) -> Any:
    """Return a config; raise ModelNotSupportedError, naming ``place``, if it has no model of this class to train."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    )

    if quantization := quantization_of(config):
        matrix_codec(quantization, place)
    for name in ("_attn_implementation", "_experts_implementation"):
        if "/" in str(getattr(config, name, None)):  # transformers would download the code of this kernel, and run it
            raise ModelNotSupportedError(
                f"{place}: its config names a kernel on the hub ({getattr(config, name)}); remove {name[1:]} from it"
            )
    auto_map = getattr(config, "auto_map", None) or {}
    causal = model_class is AutoModelForCausalLM
    mapping = MODEL_FOR_CAUSAL_LM_MAPPING if causal else MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if type(config) not in mapping and model_class.__name__ not in auto_map:
        kind = "causal language model" if causal else "sequence classification model"
        raise ModelNotSupportedError(
            f"{place}: {config.model_type!r} has no {kind} in transformers; Horizon-LM trains decoders"
        )
    if causal and (name := _names_classifier(config)):
        raise ModelNotSupportedError(
            f"{place} holds a {name}, which has no language model head; from Python, load it with "
            "from_pretrained(..., model_class=AutoModelForSequenceClassification)"
        )
    return config


def skeleton_of(config: Any, place: str, **options: Any) -> Any:
    """Return the model of a config without weights; raise ConfigError, naming ``place``, if it cannot be built."""
    try:
        return build_skeleton(config, **{k: v for k, v in options.items() if v is not None})
    except HorizonError:
        raise
    except Exception as error:  # the model's own code, with any values of its config
        attention = options.get("attn_implementation")
        if attention is not None and isinstance(error, ImportError):  # a kernel that is not installed
            raise ConfigError(
                f"attn_implementation: {attention} cannot be used here ({first_line(error)}); choose sdpa, or varlen, which "
                "needs no package"
            ) from error
        raise ConfigError(
            f"{place}: transformers cannot build this model ({first_line(error)}); correct its config.json, or the setting "
            "that the message names"
        ) from error


def open_skeleton(folder: Path, config: Any, **options: Any) -> Any:
    """Return the model in a folder without weights, with its generation config; raise ConfigError if it cannot be
    built.
    """
    from transformers import GenerationConfig

    model = skeleton_of(config, str(folder), **options)
    if (folder / "generation_config.json").is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(folder)
        except Exception as error:  # transformers' parsers raise anything
            raise ConfigError(
                f"{folder / 'generation_config.json'} cannot be read ({first_line(error)}); download it again, or remove it"
            ) from error
    return model


def load_gguf(folder: Path, gguf_file: str, dtype: torch.dtype) -> Any:
    """Return a GGUF model dequantized to a dtype and entirely in memory, to be converted once before training."""
    from transformers import AutoModelForCausalLM, GgufConfig

    require_model_files(folder)
    read_gguf_header(gguf_path(folder, gguf_file))
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=gguf_file, dtype=dtype, quantization_config=GgufConfig(dequantize=True),
            trust_remote_code=False,
        )  # fmt: skip
    except Exception as error:  # transformers' parsers raise anything
        raise ConfigError(
            f"gguf_file: {folder / gguf_file} cannot be opened ({first_line(error)}). It needs pip install "
            "gguf accelerate (or the extra gguf), and an architecture that transformers reads from GGUF"
        ) from error
    for name, parameter in model.named_parameters():
        require_finite(name, parameter.data, folder / gguf_file)
    return model


_FACTORIES = (torch.ones, torch.zeros, torch.full, torch.rand, torch.randn, torch.arange)
_LARGE = 2**24  # elements; few buffers have as many, but the experts of one block may exceed host memory


class _LargeOnMeta(TorchFunctionMode):
    """A mode that allocates ``torch.empty``, and what other factories make of more elements than a limit, on the meta device.

    Without a limit all of it is computed, as buffers are, and an absurd size is rejected before it is allocated.
    """

    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self._limit = limit

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        elif func in _FACTORIES:  # of `torch.full`, the first argument alone is a size
            sizes = [*args[: 1 if func is torch.full else None], kwargs.get("size", ())]
            if self._limit is None:
                require_small_buffer(sizes)
            elif num_elements(sizes) > self._limit:
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


@contextmanager
def parameters_on_meta(limit: int | None) -> Iterator[None]:
    """Context manager: turn every registered parameter into a meta tensor, but compute buffers: all, or those within a limit.

    ``torch.device("meta")`` would also put buffers (rotary frequencies, scales) on the meta device.
    """
    original, count = nn.Module.register_parameter, itertools.count(1)

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        require_few_parameters(next(count))
        original(module, name, param)
        if param is not None and param.device.type != "meta":
            module._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        with _LargeOnMeta(limit):
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _build(config: Any, model_class: Any, limit: int | None, options: dict[str, Any]) -> Any:
    """Return the model of a config as its class builds it, without weights. ``limit``: see `parameters_on_meta`."""
    from transformers.initialization import no_init_weights

    # Random initialization on the meta device has no effect, but takes most of the time of building a model. Some classes draw
    # parameters by themselves; in transformers they do so on the meta device, which leaves the caller's random state alone.
    with no_init_weights(), parameters_on_meta(limit), torch.random.fork_rng(devices=()):
        return auto_class(model_class).from_config(config, **{"trust_remote_code": False, **options})


def _buffers_on_meta(model: nn.Module) -> list[str]:
    return [name for name, buffer in model.named_buffers() if buffer.device.type == "meta"]


def build_skeleton(config: Any, model_class: Any = None, **options: Any) -> nn.Module:
    """Return the model of a Hugging Face config without weights, in evaluation mode: that of `auto_class`.

    Its buffers, and the dtypes of all its tensors, are those that transformers gives a model that is opened with the option
    ``dtype``; without this option, with the dtype of the config.
    """
    try:
        model = _build(config, model_class, _LARGE, options)
    except RuntimeError:  # it computes with a large table
        model = None
    if model is None or _buffers_on_meta(model):
        model = _build(config, model_class, None, options)
    lost = _buffers_on_meta(model)
    assert not lost, f"{type(model).__name__}: the buffer {lost[0]} was made by torch.empty"
    open_like_transformers(model)
    model.tie_weights()
    return model.eval()


def meta_copy(module: nn.Module) -> nn.Module:
    """Return a deep copy whose parameters are meta tensors, without duplicating weights even temporarily."""
    import copy

    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()
    }
    for part in module.modules():  # hooks may refer to anything, so share them with the copy
        memo |= {id(hooks): hooks for name, hooks in part.__dict__.items() if name.endswith("_hooks")}
    return copy.deepcopy(module, memo)


_CHUNK = 1 << 22  # elements per chunk when counting non-finite values


def require_finite(name: str, tensor: torch.Tensor, place: object) -> None:
    """Raise ConfigError, naming ``place``, if a weight has NaN or infinite values; check it in one pass
    without copies.
    """
    if not tensor.numel() or all(bound.isfinite() for bound in torch.aminmax(tensor)):  # aminmax propagates NaN
        return
    number = sum(int((~part.isfinite()).sum()) for part in tensor.reshape(-1).split(_CHUNK))
    raise ConfigError(
        f"{name} has {number:,} NaN or infinite values of {tensor.numel():,} in {place}, which training would spread; "
        "download it again, or use an earlier checkpoint"
    )
