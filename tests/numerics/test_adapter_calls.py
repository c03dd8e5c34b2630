"""Sequences of PEFT's calls on a streamed model: merge, switch off, switch, delete, unload and save, as on a plain model."""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="needs the whole installation")

import peft
from peft import LoraConfig, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from safetensors.torch import load_file

import horizon_lm
from horizon_lm.errors import StreamingError
from tests.seams.compare import difference
from tests.support import tiny_models
from tests.support.thinned_cases import thinned

pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = [40, 1, 7, 22]
Step = Any  # a value that must be the same on a plain and on a streamed model
Sequence = Callable[[Any], Iterator[Step]]


def lora(**settings: Any) -> Callable[[], Any]:
    return lambda: LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]} | settings))


def method(name: str, **settings: Any) -> Callable[[], Any]:
    return lambda: getattr(peft, f"{name}Config")(**({"target_modules": ["q_proj", "down_proj"]} | settings))


CONFIGS: dict[str, Callable[[], Any]] = {
    "lora": lora(),
    "dora": lora(use_dora=True),
    "bias": lora(bias="lora_only"),
    "trained tokens": lora(trainable_token_indices=TOKENS),
    "only trained tokens": lambda: peft.TrainableTokensConfig(token_indices=TOKENS, task_type="CAUSAL_LM"),
    "embedding": lora(target_modules=["q_proj", "embed_tokens"]),
    "head": lora(target_modules=["q_proj", "lm_head"]),
    "saved head": lora(modules_to_save=["lm_head"]),
    "saved embedding": lora(modules_to_save=["embed_tokens"]),
    "saved both": lora(modules_to_save=["lm_head", "embed_tokens"]),
    "saved norm": lora(modules_to_save=["norm"]),
    "saved projection": lora(modules_to_save=["v_proj"]),
    "saved mlp": lora(target_modules=["q_proj"], modules_to_save=["mlp"]),
    "IA3": method("IA3", feedforward_modules=["down_proj"]),
    "OFT": method("OFT", oft_block_size=8, r=0),
    "LoHa": method("LoHa", r=4, alpha=8),
    "LNTuning": method("LNTuning", target_modules=["input_layernorm"], task_type="CAUSAL_LM"),
}
SAVING = [name for name in CONFIGS if name.startswith("saved")]


def filled(model: Any, seed: int = 3) -> Any:
    """Give the active adapters values that change what the model computes, the same each time."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.data.add_(torch.randn(param.shape).to(param.dtype) * 0.02)
    return model


def adapted(model: Any, config: Any) -> Any:
    torch.manual_seed(1)
    return filled(get_peft_model(model, config))


def build(tied: bool = False) -> Any:
    return tiny_models.build("llama", tie_word_embeddings=tied)


def stream(model: Any, **settings: Any) -> Any:
    return horizon_lm.stream(model, **({"precision": "float32", "head": "whole"} | settings))


def logits(model: Any, **arguments: Any) -> torch.Tensor:
    batch = tiny_models.batch()
    with torch.no_grad():
        return model.eval()(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], **arguments
        ).logits.clone()


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def trained(model: Any) -> list[float]:
    """Train two steps, and return the losses."""
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer, losses = torch.optim.SGD(params, lr=0.1), []
    for step in range(2):
        loss = model.train()(**tiny_models.batch(seed=step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def play(sequence: Sequence, plain: Any, models: list[Any], tolerance: float = 0.0) -> None:
    """Compare each step of a sequence on a plain and on streamed models; by default bit for bit."""
    expected = list(sequence(plain))
    for model in models:
        for number, (one, other) in enumerate(zip(expected, sequence(model), strict=True)):
            assert difference(one, other, tolerance) is None, number


def worlds(config: Callable[[], Any], tied: bool = False, **settings: Any) -> tuple[Any, list[Any]]:
    """Return an adapted plain model, and the same streamed, with adapters that were added before and after."""
    late = adapted(stream(build(tied), **settings), config())
    return adapted(build(tied), config()), [stream(adapted(build(tied), config()), **settings), late]


def merged_and_disabled(model: Any) -> Iterator[Step]:
    yield logits(model)
    model.merge_adapter()
    yield weights(model)
    yield logits(model)
    with model.disable_adapter():
        yield logits(model)
    yield weights(model)
    yield logits(model)
    yield trained(model)[:1]
    model.merge_adapter()
    yield weights(model)
    with model.disable_adapter():
        yield float(model.eval()(**tiny_models.batch()).loss.detach())
    merged = model.merge_and_unload()
    yield weights(merged)
    yield logits(merged)


def unloaded(model: Any) -> Iterator[Step]:
    yield trained(model)
    plain = model.unload()
    yield weights(plain)
    yield saved(plain)
    yield logits(plain)


def merged_for_good(model: Any) -> Iterator[Step]:
    yield trained(model)
    merged = model.merge_and_unload()
    yield saved(merged)
    yield logits(merged)
    yield weights(merged)
    merged.requires_grad_(True)
    yield trained(merged)
    yield weights(merged)


def saved(model: Any) -> dict[str, torch.Tensor]:
    """Save a model, and return the weights in the files. Those of `named_weights` are the same."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        found = {n: value for path in Path(folder).glob("*.safetensors") for n, value in load_file(path).items()}
    if hasattr(model, "_horizon"):
        named = {name: value.clone() for name, value in horizon_lm.named_weights(model)}
        assert difference(found, named, 0.0) is None
    return found


ENDS = list(itertools.product(CONFIGS, (unloaded, merged_for_good)))


@pytest.mark.parametrize(
    ("kind", "sequence"),
    thinned(ENDS, every=7, keep=[("saved both", merged_for_good), ("saved projection", unloaded)]),
)
def test_unloaded_after_a_step(kind: str, sequence: Sequence) -> None:
    """The trained copies of modules take the place of the modules, under their names."""
    plain, models = worlds(CONFIGS[kind])
    play(sequence, plain, models)


@pytest.mark.parametrize("kind", thinned(list(CONFIGS), every=6, keep=["lora", "trained tokens"]))
def test_merged_and_then_disabled(kind: str) -> None:
    """A forward pass under `disable_adapter()` unmerges, in the host memory of the base, too."""
    plain, models = worlds(CONFIGS[kind])
    play(merged_and_disabled, plain, models)


def two(model: Any) -> Any:
    """Add a second adapter, which is not active."""
    torch.manual_seed(2)
    model.add_adapter("other", LoraConfig(r=2, lora_alpha=16, target_modules=["q_proj", "up_proj"]))
    model.set_adapter("other")
    filled(model, seed=5)
    model.set_adapter("default")
    return model


def switched_while_merged(model: Any) -> Iterator[Step]:
    model.merge_adapter(["default", "other"])
    yield weights(model)
    model.set_adapter("other")
    yield weights(model)
    yield logits(model)
    yield trained(model)
    model.merge_adapter()
    model.unmerge_adapter()
    yield weights(model)
    model.merge_adapter(safe_merge=True)
    with model.disable_adapter():
        yield float(model.train()(**tiny_models.batch()).loss.detach())
    yield logits(model)


def deleted_while_merged(model: Any) -> Iterator[Step]:
    model.merge_adapter(["default"])
    with pytest.raises(ValueError, match="while they are merged"):
        model.delete_adapter("default")
    yield logits(model)
    model.unmerge_adapter()
    model.delete_adapter("default")
    yield logits(model)
    model.set_adapter("other")
    yield logits(model)
    yield weights(model)


def weighted(model: Any) -> Iterator[Step]:
    for number, how in enumerate(("linear", "cat", "ties")):
        kind = {"density": 0.5} if how == "ties" else {}
        names = ["default", "default"] if how in ("linear", "ties") else ["default", "other"]
        model.add_weighted_adapter(names, [0.7, 0.4], f"sum{number}", combination_type=how, **kind)
        model.set_adapter(f"sum{number}")
        yield logits(model)
    model.merge_adapter(["sum0", "sum1"])
    with model.disable_adapter():
        yield logits(model)
    yield weights(model)


def weighted_by_svd(model: Any) -> Iterator[Step]:
    model.add_weighted_adapter(["default", "other"], [0.7, 0.4], "sum", combination_type="svd")
    model.set_adapter("sum")
    yield logits(model)
    model.merge_adapter(["sum"])
    yield weights(model)


def mixed(model: Any) -> Iterator[Step]:
    """Each row of a batch has an adapter of its own."""
    rows = len(tiny_models.batch()["input_ids"])
    yield logits(model, adapter_names=["other", "__base__", *["default"] * (rows - 2)])
    yield logits(model)


def half_merged(model: Any) -> Iterator[Step]:
    """The second of two adapters is rejected in the first layer, which has the first one then."""
    yield logits(model)
    layer = next(module for module in model.modules() if "other" in getattr(module, "lora_B", ()))
    with torch.no_grad():
        layer.lora_B["other"].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="seems to be broken"):
        model.merge_adapter(["default", "other"], safe_merge=True)
    yield logits(model)
    with model.disable_adapter():
        yield logits(model)
    yield {name: value.nan_to_num() for name, value in weights(model).items()}


def hotswapped(model: Any) -> Iterator[Step]:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, selected_adapters=["default"])
        trained(model)
        hotswap_adapter(model, folder, "default")
    yield logits(model)
    yield trained(model)
    yield weights(model)


SWITCHES = [switched_while_merged, deleted_while_merged, weighted, mixed, half_merged, hotswapped]


@pytest.mark.parametrize("sequence", SWITCHES)
def test_two_adapters(sequence: Sequence) -> None:
    plain, models = worlds(lora())
    play(sequence, two(plain), [two(model) for model in models])


def test_two_adapters_that_are_summed_by_svd() -> None:
    """LAPACK's last bits depend on where the matrix lies in memory, on some processors."""
    plain, models = worlds(lora())
    play(weighted_by_svd, two(plain), [two(model) for model in models], tolerance=1e-6)


def test_mixed_batches_outside_of_blocks_are_rejected() -> None:
    settings = lora(modules_to_save=["lm_head"])
    model = stream(adapted(build(), settings()))
    model.add_adapter("other", settings())
    with pytest.raises(StreamingError, match=r"adapter_names: .* not supported by the head"):
        next(mixed(model))


def first_in_inference_mode(model: Any) -> Iterator[Step]:
    with torch.inference_mode():
        yield logits(model)
    assert not any(param.is_inference() for param in model.parameters())
    two(model)
    with torch.inference_mode():
        model.merge_adapter()
        yield logits(model)
    model.set_adapter("other")
    yield trained(model)
    yield weights(model)
    yield weights(model.merge_and_unload())


def test_first_used_in_inference_mode() -> None:
    """The parameters of new adapters are no inference tensors, which could not be switched or trained."""
    plain, models = worlds(lora())
    play(first_in_inference_mode, plain, models)
    model = build()
    with torch.inference_mode():
        stream(model)
        made = build()
    with pytest.raises(StreamingError, match="created in inference mode"):
        stream(made)
    assert difference(trained(build()), trained(model), 0.0) is None


def test_adapters_on_the_meta_device(tmp_path: Path) -> None:
    """With `low_cpu_mem_usage`, PEFT adds adapters without values, and fills them later."""
    adapted(build(), lora()()).save_pretrained(tmp_path)
    state = load_file(tmp_path / "adapter_model.safetensors")

    def opened(model: Any) -> Iterator[Step]:
        model = peft.PeftModel.from_pretrained(model, tmp_path, low_cpu_mem_usage=True, is_trainable=True)
        yield logits(model)
        model.load_adapter(tmp_path, "second", low_cpu_mem_usage=True, is_trainable=True)
        model.set_adapter("second")
        yield trained(model)
        yield weights(model)

    def injected(model: Any) -> Iterator[Step]:
        peft.inject_adapter_in_model(lora()(), model, low_cpu_mem_usage=True)
        found = peft.get_peft_model_state_dict(model)
        yield sorted((name, str(value.device)) for name, value in found.items())
        values = {name: value.clone() for name, value in state.items()}
        peft.set_peft_model_state_dict(model, values, low_cpu_mem_usage=True)
        yield logits(model)
        yield trained(model)
        yield weights(model)

    for sequence in (opened, injected):
        play(sequence, build(), [stream(build())])


def test_adapters_that_were_never_filled_are_named() -> None:
    model = stream(build())
    peft.inject_adapter_in_model(lora()(), model, low_cpu_mem_usage=True)
    for use in (lambda: model(**tiny_models.batch()), lambda: horizon_lm.AdamW(model)):
        with pytest.raises(StreamingError, match="have no values yet"):
            use()
