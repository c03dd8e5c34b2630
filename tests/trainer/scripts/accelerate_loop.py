"""Train by a loop with accelerate."""

import sys

import torch
from accelerate import Accelerator
from rows import tokenized, write_losses
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, get_scheduler


def main():
    _, name, _, output = sys.argv
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name)
    data = torch.utils.data.DataLoader(tokenized(tokenizer), 2, collate_fn=DataCollatorForSeq2Seq(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=8)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    model.train()
    losses = []
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.unwrap_model(model).save_pretrained(f"{output}/model")
    write_losses(output, losses)


if __name__ == "__main__":
    main()
