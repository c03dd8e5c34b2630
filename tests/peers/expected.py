"""The rejections and the differences that are right, each with its reason; everything else is a failure."""

REJECTIONS = {  # a pattern of the message
    r"not in the table of proven models": "a model with code of its own; its user sets `allow_unproven_model=True`",
    r"float16": "float16: its gradients need loss scaling; bfloat16 and float32 are supported",
    r"are in several blocks, each of which would train its own": "PEFT's VB-LoRA, UniLoRA and TinyLoRA share one trained tensor between blocks",
    r"PEFT's \w+ is not streamed": "PEFT's methods that were not compared with plain PEFT",
    r"was added, removed or replaced after horizon_lm\.stream": "PEFT's adaption prompt replaces the attention of a streamed model",
    r"a streamed model cannot be copied": "`copy.deepcopy` of a model that takes most of the memory",
    r"so its \.data cannot be replaced": "PEFT's merge of trained tokens replaces the storage of the embedding",
    r"torch_compile=True is not supported": "`compile=True` of `stream()` compiles the blocks",
    r"the input embedding of a streamed model has no gradient when": "the embedding called by itself, in training mode",
    r"the reference of this set was not computed before training": "DPO's precomputed reference of another set; a streamed `ref_model` is computed with any set",
    r"sync_ref_model=True is not supported": "a reference that follows the model; its weights would be written",
    r"past_key_values need gradients": "PEFT's prefix tuning trains keys and values",
}
DIFFERENCES = {
    r"test_kto_trainer.*test_train_with_eval$": "the KL divergence of a model and its reference, which are almost equal, is rounding",  # a pattern of the test's id: its trainings leave other values
    r"test_reward_trainer": "the score of a reward model made of a causal one is drawn from another random state",
}
ALLOWED = {  # a pattern of the test's id: an error that the test expects is not raised
    "test_gradient_checkpointing_double_forward_raises": "two forward passes with activated LoRA before the backward: each block is recomputed with the hooks of its own forward",
}
