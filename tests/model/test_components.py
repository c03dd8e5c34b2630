"""The towers, the projector and the language model of a model, and the layers that get adapters if some of them are frozen."""

import copy
from typing import Any

import pytest

from horizon_lm.errors import ConfigError
from horizon_lm.model.adapters import Adapters
from horizon_lm.model.components import Component, component_of_modules, component_of_params, modules_of
from horizon_lm.model.freezing import freeze
from tests.census.tiny_models import build
from tests.support import tiny_models

TOWER, PROJECTOR, TEXT = Component
_PARTS_OF_QWEN = ["model.visual.patch_embed", "model.visual.pos_embed", "model.visual.blocks"]

# The outermost modules of towers and of the projector: beside the language model, inside the tower, inside the model around the
# blocks, a model of transformers itself, and with parameters of its own.
MODULES = {
    "llava": (["model.vision_tower"], ["model.multi_modal_projector"]),
    "llava_next": (["model.vision_tower"], ["model.multi_modal_projector"]),
    "qwen2_5_vl": (["model.visual.patch_embed", "model.visual.blocks"], ["model.visual.merger"]),
    "qwen3_vl": ([*_PARTS_OF_QWEN, "model.visual.deepstack_merger_list"], ["model.visual.merger"]),
    "qwen2_5_omni_thinker": (
        ["model.audio_tower", "model.visual.patch_embed", "model.visual.blocks"],
        ["model.visual.merger"],
    ),
    "idefics2": (["model.vision_model"], ["model.connector"]),
    "molmo2": (["model.vision_tower"], ["model.multi_modal_projector"]),
    "chameleon": (["model.vqmodel"], []),
    "evolla": (["model.protein_encoder.model"], ["model.protein_encoder.sequence_compressor_resampler"]),
    "video_llava": (["model.video_tower", "model.image_tower"], ["model.multi_modal_projector"]),
}


@pytest.fixture(scope="module")
def gemma() -> Any:
    return build("gemma3", "image_text")


def with_weights(model: Any, component: Component) -> list[str]:
    paths = modules_of(component_of_modules(model), [component])
    return [path for path in paths if any(True for _ in model.get_submodule(path).parameters())]


@pytest.mark.parametrize("kind", MODULES)
def test_components(kind: str) -> None:
    model = build(kind, "image_text")
    assert (with_weights(model, TOWER), with_weights(model, PROJECTOR)) == MODULES[kind]
    components = component_of_params(model)
    blocks = [name for name in components if ".layers." in name and "language_model" in name]
    tables = [name for name, param in model.named_parameters() if param is model.get_input_embeddings().weight]
    assert {components[name] for name in (*blocks, *tables)} == {TEXT}


def test_parameters_beside_all_modules_belong_to_the_projector() -> None:
    assert component_of_params(build("llava_next", "image_text"))["model.image_newline"] is PROJECTOR


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_a_model_of_text_is_nothing_else(family: str) -> None:
    assert set(component_of_params(tiny_models.build(family)).values()) == {TEXT}


@pytest.mark.parametrize("frozen", [{TOWER, PROJECTOR}, {TEXT}, set()])
def test_frozen_components(gemma: Any, frozen: set[Component]) -> None:
    model = copy.deepcopy(gemma)
    freeze(model, None, frozen)
    components = component_of_params(model)
    assert all(param.requires_grad == (components[name] not in frozen) for name, param in model.named_parameters())


@pytest.mark.parametrize("modules", [None, "all-linear", ("q_proj", "v_proj"), r".*\.(q_proj|fc1)"])
@pytest.mark.parametrize("frozen", [set(), {TOWER}, {TOWER, PROJECTOR}, {TEXT}])
def test_frozen_components_get_no_adapters(gemma: Any, modules: Any, frozen: set[Component]) -> None:
    adapters = Adapters(r=2, target_modules=modules, frozen=frozenset(frozen))
    model = adapters.add_to(copy.deepcopy(gemma), draw=True).get_base_model()
    adapted = {name.partition(".lora_A")[0] for name, _ in model.named_parameters() if "lora_A" in name}
    components = component_of_modules(gemma)
    assert {components[name] for name in adapted if name in components} == {TOWER, TEXT} - frozen


@pytest.mark.parametrize(
    ("modules", "frozen", "message"),
    [
        (
            ("q_proj", "fc1"),
            {TOWER},
            "fc1 is only in the vision tower, which is frozen; set freeze_vision_tower: false",
        ),
        (r".*vision.*fc\d", {TOWER}, "only in the vision tower"),
        (("gate_proj",), {TEXT}, "gate_proj is only in the language model, which is frozen"),
        (("q_prok",), {TOWER}, "the model has no q_prok"),
    ],
)
def test_layers_that_only_frozen_components_have(
    gemma: Any, modules: Any, frozen: set[Component], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Adapters(r=2, target_modules=modules, frozen=frozenset(frozen)).add_to(copy.deepcopy(gemma), draw=False)


def test_parameters_that_frozen_components_have(gemma: Any) -> None:
    name = "fc1.weight"
    adapters = Adapters(r=2, lora_dropout=0.0, target_modules=(), target_parameters=(name,), frozen=frozenset({TOWER}))
    with pytest.raises(ConfigError, match=f"lora_target_parameters: {name} is only in the vision tower"):
        adapters.add_to(copy.deepcopy(gemma), draw=False)


@pytest.mark.parametrize("frozen", [set(), {TOWER}, {TEXT}])
def test_parameters_of_frozen_components_get_no_adapters(gemma: Any, frozen: set[Component], tmp_path: Any) -> None:
    """Both have a layer of this name. The folder of the adapters opens with the same ones."""
    adapters = Adapters(r=2, lora_dropout=0.0, target_parameters=("q_proj.weight",), frozen=frozenset(frozen))
    model = adapters.add_to(copy.deepcopy(gemma), draw=True)
    adapted = [name for name, _ in model.get_base_model().named_parameters() if "lora_A" in name]
    components = component_of_modules(gemma)
    assert {components[name.partition(".lora_A")[0]] for name in adapted} == {TOWER, TEXT} - frozen
    model.save_pretrained(tmp_path)
    opened = Adapters(folder=str(tmp_path)).add_to(copy.deepcopy(gemma), draw=True)
    assert [name for name, _ in opened.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_adapters_beside_frozen_components_open_again(gemma: Any, tmp_path: Any) -> None:
    adapters = Adapters(r=2, target_modules="all-linear", frozen=frozenset({TOWER, PROJECTOR}))
    saved = adapters.add_to(copy.deepcopy(gemma), draw=True)
    saved.save_pretrained(tmp_path)
    opened = Adapters(folder=str(tmp_path)).add_to(copy.deepcopy(gemma), draw=True)
    assert [name for name, _ in opened.named_parameters()] == [name for name, _ in saved.named_parameters()]
