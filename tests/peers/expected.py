"""The rejections and the differences of values that are right, each with its reason; everything else is a failure."""

REJECTIONS = {  # a pattern of the message
    r"not in the table of proven models": "a model with code of its own; its user sets `allow_unproven_model=True`",
    r"float16": "float16: its gradients need loss scaling; bfloat16 and float32 are supported",
    r"are in several blocks, each of which would train its own": "PEFT's VB-LoRA, UniLoRA and TinyLoRA share one trained tensor between blocks",
    r"PEFT's \w+ is not streamed": "PEFT's methods that were not compared with plain PEFT",
    r"AdamW was given a parameter that is not of this model": "prompts with Horizon-LM's AdamW; other optimizers train them",
}
DIFFERENCES: dict[str, str] = {}  # a pattern of the test's id
