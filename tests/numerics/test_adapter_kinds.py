"""PEFT's methods and initialisations, before and after `stream()`: as in plain PEFT, or rejected by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.thinned_cases import covering, thinned

pytest.importorskip("peft", reason="needs the whole installation")

import peft
from peft import get_peft_model

import horizon_lm
from horizon_lm.errors import HorizonError, ModelNotSupportedError, StreamingError
from tests.seams.compare import difference
from tests.support import tiny_models
from tests.support.peft_methods import CAUSAL, EMBEDDING, MODULES, WORK, lora, method

pytestmark = pytest.mark.filterwarnings("ignore")


_DORA = "DoRA of the input embedding"
_SHARED = "are in several blocks"
# Rejected, with what the error says before and after.
REJECTED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "dora of the embedding": (lora(target_modules=[*MODULES, "embed_tokens"], use_dora=True), _DORA, _DORA),
    "layer_replication": (lora(layer_replication=[(0, 2), (1, 3)]), "layer_replication", "layer_replication"),
    "Lily": (method("Lily"), _SHARED, _SHARED),
    "TinyLora": (method("TinyLora"), _SHARED, _SHARED),
    "UniLora": (method("UniLora"), _SHARED, _SHARED),
    "VBLoRA": (method("VBLoRA", r=2, vector_length=8, num_vectors=20), _SHARED, _SHARED),
    "OSF": (method("OSF", effective_rank=4), "OSF is not streamed", "OSF is not streamed"),
    "AdaptionPrompt": (
        lambda: peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=2, **CAUSAL),
        "ADAPTION_PROMPT is not streamed",
        "Change the model first",
    ),
    "PrefixTuning": (
        lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, **CAUSAL),
        "PREFIX_TUNING is not streamed",
        "prefix tuning, which is not streamed",
    ),
    "CPT": (
        lambda: peft.CPTConfig(cpt_token_ids=[1, 2], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 1], **CAUSAL),
        "CPT is not streamed",
        "without keeping the logits",
    ),
    "MultitaskPromptTuning": (
        lambda: peft.MultitaskPromptTuningConfig(num_virtual_tokens=3, num_tasks=2, **CAUSAL),
        "MULTITASK_PROMPT_TUNING is not streamed",
        "",
    ),
    "Poly": (method("Poly", r=4, n_tasks=2, n_skills=2), "POLY is not streamed", "POLY is not streamed"),
}


def build(tied: bool = False) -> Any:
    return tiny_models.build("llama", tie_word_embeddings=tied)


def adapted(model: Any, config: Any) -> Any:
    """Return a model with adapters that change what it computes."""
    torch.manual_seed(1)
    model = get_peft_model(model, config)
    torch.manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.data.add_(torch.randn(param.shape).to(param.dtype) * 0.02)
    return model


def gradients(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    loss = model.train()(**tiny_models.batch()).loss
    loss.backward()
    return float(loss), {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def stream(model: Any) -> Any:
    return horizon_lm.stream(model, precision="float32")


def assert_equal(plain: Any, models: list[Any], tolerance: float = 0.0) -> None:
    """Compare losses, and gradients, by default bit for bit."""
    loss, expected = gradients(plain)
    assert expected
    for model in models:
        got, found = gradients(model)
        assert got == pytest.approx(loss, rel=3e-6)
        assert difference(expected, found, tolerance) is None


@pytest.mark.parametrize("kind", thinned(WORK, every=3))
def test_equal_to_plain_peft(kind: str) -> None:
    config = WORK[kind]
    early, late = stream(adapted(build(), config())), adapted(stream(build()), config())
    assert_equal(adapted(build(), config()), [early, late])


@pytest.mark.parametrize(
    "kind", [*EMBEDDING, "modules_to_save=lm_head", "target_modules=lm_head", "modules_to_save=norm"]
)
def test_equal_with_a_tied_head(kind: str) -> None:
    config = WORK[kind]
    early, late = stream(adapted(build(True), config())), adapted(stream(build(True)), config())
    assert_equal(adapted(build(True), config()), [early, late])


# Initialisations that write weights of the base.
WRITES = ("pissa", "pissa_niter_4", "olora")


@pytest.mark.parametrize(("init", "precision"), covering(WRITES, ("float32", "bf16", "fp32_master")))
def test_adapters_that_change_the_base(init: str, precision: str) -> None:
    """The base and the adapters begin with the values of plain PEFT on a base of the same dtype, bit for bit."""

    def base() -> Any:
        return build() if precision == "float32" else build().to(torch.bfloat16)

    plain, model = base(), horizon_lm.stream(base(), precision=precision)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for each in (plain, model):
        torch.manual_seed(1)
        get_peft_model(each, lora(init_lora_weights=init)())
    begun = [{name: param.detach().clone() for name, param in each.named_parameters()} for each in (plain, model)]
    assert difference(*begun, 0.0) is None
    changed = [
        name
        for name, value in before.items()
        if not torch.equal(value, begun[1].get(name, begun[1].get(name.replace(".weight", ".base_layer.weight"))))
    ]
    assert len(changed) == 3 * len(MODULES)
    if precision == "float32":
        assert difference(gradients(plain)[1], gradients(model)[1], 0.0) is None
    with pytest.raises(StreamingError, match=r"\.data cannot be replaced"):
        model.model.norm.weight.data = torch.zeros_like(model.model.norm.weight)


@pytest.mark.parametrize("kind", REJECTED)
def test_rejected_by_name(kind: str) -> None:
    config, before, after = REJECTED[kind]
    with pytest.raises(ModelNotSupportedError, match=before):
        stream(adapted(build(), config()))
    if after:
        with pytest.raises(HorizonError, match=after):
            gradients(adapted(stream(build()), config()))


def test_a_model_is_as_before_once_rejected_adapters_are_gone() -> None:
    model = stream(build())
    _, expected = gradients(model)
    model.zero_grad()
    tuned = get_peft_model(model, REJECTED["TinyLora"][0]())
    with pytest.raises(ModelNotSupportedError):
        tuned(**tiny_models.batch())
    tuned.unload()
    model.requires_grad_(True)
    assert difference(expected, gradients(model)[1], 0.0) is None


def _eva(model: Any) -> Any:
    model = get_peft_model(model, WORK["eva"]())
    peft.initialize_lora_eva_weights(
        model, [tiny_models.batch(seed=step) for step in range(3)], show_progress_bar=False
    )
    return model


def _corda(model: Any) -> Any:
    from peft.tuners.lora.corda import preprocess_corda

    config = lora(init_lora_weights="corda", corda_config=peft.tuners.lora.config.CordaConfig(corda_method="kpm"))()
    with torch.no_grad():
        preprocess_corda(model, config, run_model=lambda: model(**tiny_models.batch(rows=1)))
    return get_peft_model(model, config)


def _lora_ga(model: Any) -> Any:
    from peft.tuners.lora.loraga import preprocess_loraga

    config = lora(init_lora_weights="lora_ga", lora_ga_config=peft.LoraGAConfig())()
    preprocess_loraga(model, config, lambda: model(**tiny_models.batch(rows=1)).loss.backward())
    return get_peft_model(model, config)


@pytest.mark.parametrize("initialise", [_eva, _corda, _lora_ga])
@pytest.mark.parametrize("late", [False, True])
def test_initialisations_from_data(initialise: Callable[[Any], Any], late: bool) -> None:
    """They compute with activations or gradients of the base, plain or streamed, and some change it."""
    plain, other = initialise(build()), initialise(stream(build()) if late else build())
    values = [{name: param.detach().clone() for name, param in each.named_parameters()} for each in (plain, other)]
    assert difference(*values, 1e-4) is None
    assert_equal(plain, [other if late else stream(other)], 0.0 if not late else 1e-4)


def test_resized_embeddings() -> None:
    def resized() -> Any:
        torch.manual_seed(2)
        model = build()
        model.resize_token_embeddings(model.config.vocab_size + 8)
        return model

    config = lora()
    early, late = stream(adapted(resized(), config())), adapted(stream(resized()), config())
    assert_equal(adapted(resized(), config()), [early, late])


def test_adalora_moves_its_ranks_while_training() -> None:
    trained = []
    for streams in (False, True):
        config = peft.AdaLoraConfig(
            target_modules=MODULES, init_r=6, target_r=2, tinit=1, tfinal=1, deltaT=1, total_step=8
        )
        model = adapted(stream(build()) if streams else build(), config)
        params = [param for param in model.parameters() if param.requires_grad]
        optimizer: Any = torch.optim.AdamW(params, lr=1e-2)
        for step in range(6):
            model.train()(**tiny_models.batch(seed=step)).loss.backward()
            optimizer.step()
            model.base_model.update_and_allocate(step)
            optimizer.zero_grad()
        trained.append({name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name})
    assert any((value == 0).any() for name, value in trained[0].items() if "lora_E" in name)
    assert difference(*trained, 1e-4) is None
