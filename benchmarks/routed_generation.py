"""Generate with a mixture of 128 experts: time and bytes of a token with all experts streamed, and with those it is routed to.

    python benchmarks/routed_generation.py [--tokens 8] [--rounds 3] [--output FILE.md]

Blocks as wide as those of Qwen3-30B-A3B, with random weights in bf16, one prompt. Both ways take turns in one process, and their
answers are compared bit for bit.
"""

import argparse
import statistics
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch
from peers_cpu import processor, versions
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import horizon_lm
from horizon_lm.engine.passes.expert_tiles import ExpertTiles

BLOCKS, EXPERTS, PER_TOKEN, HIDDEN, WIDTH = 3, 128, 8, 2048, 768
CONFIG = Qwen3MoeConfig(
    hidden_size=HIDDEN, moe_intermediate_size=WIDTH, num_hidden_layers=BLOCKS, num_experts=EXPERTS,
    num_experts_per_tok=PER_TOKEN, num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=8192,
)  # fmt: skip
EVERY, ROUTED = "all experts", "routed experts"


def moved(model: Any) -> Mapping[str, int]:
    """Return the bytes that were moved to the device: of blocks, or their cores, and of chosen experts."""
    found = {
        name: count
        for name, count in horizon_lm.stats(model)["moved_bytes"].items()
        if name.startswith("stream_in:block")
    }
    experts = sum(count for name, count in found.items() if ".tile" in name)
    return {"block": sum(found.values()) - experts, "experts": experts}


@torch.no_grad()
def measure(tokens: int, rounds: int) -> dict[str, tuple[float, dict[str, int]]]:
    """Return the median seconds of a token, and the bytes that it moves as `moved` has them, for each way."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    model = horizon_lm.stream(plain, "cpu", precision="bf16").eval()
    prompt, own = torch.tensor([[17, 4, 99, 3]]), ExpertTiles.routed
    ways: dict[str, Any] = {EVERY: lambda self, num_tokens: frozenset(), ROUTED: own}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    last: dict[str, dict[str, int]] = {}
    answers: dict[str, torch.Tensor] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            ExpertTiles.routed = way  # type: ignore[method-assign]
            cache = model(prompt, use_cache=True).past_key_values
            token, logits = prompt[:, -1:], []
            for _ in range(tokens):
                before, clock = moved(model), time.perf_counter()
                output = model(token, past_key_values=cache, use_cache=True)
                seconds[name].append(time.perf_counter() - clock)
                last[name] = {part: count - before[part] for part, count in moved(model).items()}
                logits.append(output.logits)
                token = output.logits[:, -1:].argmax(-1)
            answers[name] = torch.cat(logits)
    assert torch.equal(answers[EVERY], answers[ROUTED])
    return {name: (statistics.median(each), last[name]) for name, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    found = measure(args.tokens, args.rounds)
    expert = 3 * HIDDEN * WIDTH * 2
    lines = [
        "# Generation with a mixture of experts: all experts streamed, or those that a token is routed to",
        "",
        f"{date.today().isoformat()}, {processor()}. {versions('torch', 'transformers')}.",
        f"Medians of {args.tokens * args.rounds} tokens; {BLOCKS} blocks with {EXPERTS} experts of width {WIDTH}, {PER_TOKEN} a token, hidden size "
        f"{HIDDEN}, bf16, one prompt of 4 tokens. The logits of both are equal bit for bit.",
        "",
        "| streamed | s a token | MiB a token and block | of which experts | experts |",
        "|---|---|---|---|---|",
    ]
    for name, (clock, counts) in found.items():
        blocks = {part: count / BLOCKS for part, count in counts.items()}
        of_experts = blocks["experts"] or EXPERTS * expert
        lines.append(
            f"| {name} | {clock:.3f} | {sum(blocks.values()) / 2**20:,.1f} | {of_experts / 2**20:,.1f} | {of_experts / expert:g} |"
        )
    lines += ["", f"{found[EVERY][0] / found[ROUTED][0]:.1f} times as fast."]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.output is not None:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
