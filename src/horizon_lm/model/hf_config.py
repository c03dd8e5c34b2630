"""The Hugging Face config of a model: read it from a folder, and find the class of model that it describes."""

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from horizon_lm.common.gguf_header import read_gguf_header
from horizon_lm.errors import CheckpointWarning, ConfigError, ModelNotSupportedError, first_line, warn
from horizon_lm.model.config_limits import read_settings, require_sane_config
from horizon_lm.model.folder import code_remedy, gguf_path, gguf_remedy, require_model_files, weight_files
from horizon_lm.model.gguf_config import config_of
from horizon_lm.model.own_head import has_own_head
from horizon_lm.model.proven import is_proven
from horizon_lm.model.quantization import matrix_codec, quantization_of
from horizon_lm.model.tying import declare_untied


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
    config = read_config(folder, trust_remote_code, gguf_file)
    kind = auto_class(model_class, config)
    require_model(config, str(folder), kind)
    if gguf_file is None and has_own_head(folder, config, kind):
        declare_untied(config)
        warn(
            f"{folder}: config.json says tie_word_embeddings: true, but the folder has a head of its own, which is kept, as in transformers; "
            "set it to false",
            CheckpointWarning,
        )
    return config


def read_config(folder: Path, trust_remote_code: bool, gguf_file: str | None = None) -> Any:
    """Return the config in a folder, of any kind of model. Arguments as in `load_config`; raise ConfigError if it has none."""
    from transformers import AutoConfig

    require_model_files(folder)
    if gguf_file is not None:
        return config_of(read_gguf_header(gguf_path(folder, gguf_file)))
    require_sane_config(folder / "config.json")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers' parsers raise anything
        remedy = _own_type_remedy(folder) + (code_remedy(error) or gguf_remedy(folder))
        raise ConfigError(f"{folder}: no usable config.json ({first_line(error)}){remedy}") from error


def _own_type_remedy(folder: Path) -> str:
    """Return the remedy for a config whose architecture transformers has under another type; empty for others.

    Kimi-K2 has the type ``kimi_k2`` and the architecture ``DeepseekV3ForCausalLM``. Its publisher names the same remedy.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    path = folder / "config.json"
    config = read_settings(path) if path.is_file() else {}
    kind, names = config.get("model_type"), config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    own_type = next((each for each, cls in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if cls == name), None)
    if own_type is None or not isinstance(kind, str) or kind in CONFIG_MAPPING:
        return ""
    return f"; transformers has {name} itself: to use it, set model_type: {own_type} in config.json, and remove its auto_map"


def auto_class(model_class: Any, config: Any = None) -> Any:
    """Return the class of transformers that builds a model. For None, it is AutoModelForCausalLM, or AutoModelForImageTextToText if the
    config is that of a model of images and text (`_reads_images`).

    Raises:
        ConfigError: models of this class are not read from a folder.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

    if model_class is None:
        return AutoModelForImageTextToText if _reads_images(config) else AutoModelForCausalLM
    if model_class not in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification):
        raise ConfigError(
            f"model_class is {getattr(model_class, '__name__', model_class)}; use AutoModelForCausalLM, AutoModelForImageTextToText or "
            "AutoModelForSequenceClassification, or load the model with transformers and stream() it"
        )
    return model_class


def auto_classes(config: Any) -> list[Any]:
    """Return the classes of transformers that build a model of a config, as in `auto_class`, whose own class is the first.

    There are two if transformers has a model with a tower and another one without it.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    own, with_tower = auto_class(None, config), _with_tower(config)
    text: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if not with_tower or text is None or text.__name__ == with_tower:
        return [own]
    return [own, AutoModelForCausalLM if own is AutoModelForImageTextToText else AutoModelForImageTextToText]


def _reads_images(config: Any) -> bool:
    """Return whether a config is that of a model of images and text.

    It is if transformers has no causal language model for it. If there is one, too, which has no tower and would drop its weights, the
    model is what it was saved as, if that class is proven.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in (
        getattr(config, "auto_map", None) or {}
    )
    if not (name := _with_tower(config)):
        return False
    return not causal or (name in _architectures(config) and is_proven(config.model_type, name))


def _with_tower(config: Any) -> str:
    """Return the name of the model of images and text that transformers has for a config; empty if there is none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return ""
    found: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    return str(found.__name__)


def saved_class(config: Any) -> Any:
    """Return the class (see `auto_class`) of the model that a config was saved with."""
    from transformers import AutoModelForImageTextToText, AutoModelForSequenceClassification

    if _classifier_name(config):
        return AutoModelForSequenceClassification
    # Whether the class is proven does not matter to a model that was trained.
    return AutoModelForImageTextToText if _with_tower(config) in _architectures(config) else auto_class(None, config)


def _architectures(config: Any) -> list[str]:
    """Return the names of the classes that a config was saved with."""
    return [*map(str, config.architectures)] if isinstance(config.architectures, list) else []


def _classifier_name(config: Any) -> str:
    """Return the sequence classification model among the architectures of a config; empty if there is none."""
    return next((name for name in _architectures(config) if name.endswith("ForSequenceClassification")), "")


def require_model(config: Any, place: str, model_class: Any) -> Any:
    """Return a config unchanged; raise ModelNotSupportedError, naming ``place``, if it has no model of this class to train."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    )

    if quantization := quantization_of(config):
        matrix_codec(quantization, place)  # raises the error of a format that is not decoded
    _reject_hub_kernels(config, place)
    auto_map = getattr(config, "auto_map", None) or {}
    causal = model_class is not AutoModelForSequenceClassification
    if not causal:
        mapping, kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, "sequence classification model"
    elif model_class is AutoModelForCausalLM:
        mapping, kind = MODEL_FOR_CAUSAL_LM_MAPPING, "causal language model"
    else:
        mapping, kind = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, "model of images and text"
    if type(config) not in mapping and model_class.__name__ not in auto_map:
        raise ModelNotSupportedError(
            f"{place}: {config.model_type!r} has no {kind} in transformers; Horizon-LM trains decoders"
        )
    if causal and (name := _classifier_name(config)):
        raise ModelNotSupportedError(
            f"{place} holds a {name}, which has no language model head; from Python, load it with "
            "from_pretrained(..., model_class=AutoModelForSequenceClassification)"
        )
    return config


def _reject_hub_kernels(config: Any, place: str) -> None:
    """Raise ModelNotSupportedError, naming ``place``, if transformers would download a kernel that a config names, and run it."""
    for name in ("_attn_implementation", "_experts_implementation"):
        kernel = str(getattr(config, name, None))
        if "/" in kernel:
            raise ModelNotSupportedError(
                f"{place}: its config names a kernel on the hub ({kernel}); remove {name.removeprefix('_')} from it"
            )


def config_dtype(config: Any) -> torch.dtype:
    """Return the dtype of a checkpoint, taken from its config; old configs without one mean float32."""
    dtype = getattr(config.get_text_config(), "dtype", None)
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def config_bytes(config: Any) -> int:
    """Return the bytes per element of a checkpoint, taken from its config."""
    return config_dtype(config).itemsize


def stored_bytes(folder: Path, config: Any) -> int:
    """Return the bytes per element of the checkpoint in a folder: of the most frequent floating-point type in the first file that has one.

    If no file has one or can be read, they are those of `config_bytes`.
    """
    from safetensors import SafetensorError, safe_open

    try:
        for file in weight_files(folder):
            numels = Counter[str]()  # elements by dtype; some weights, such as those of routers, may be in float32
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (not a dict)
                    entry = tensors.get_slice(name)
                    if entry.get_dtype() in ("F64", "F32", "F16", "BF16"):
                        numels[entry.get_dtype()] += math.prod(entry.get_shape())
            if numels:
                return int(re.sub(r"\D", "", numels.most_common(1)[0][0])) // 8  # the number in its name counts bits
    except (OSError, SafetensorError):  # the error is raised when the weights are read
        pass
    return config_bytes(config)
