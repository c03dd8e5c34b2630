"""Train by a loop that uses torch alone, with a model whose embeddings and config are changed after it was loaded."""

import sys

import torch
from rows import tokenized, write_losses
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

_, name, _, output = sys.argv
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float32)
tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
with torch.no_grad():
    model.get_input_embeddings().weight[-1] = model.get_input_embeddings().weight[:-1].mean(0)
    model.get_output_embeddings().weight[-1] = 0
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model.to(device)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for batch in torch.utils.data.DataLoader(tokenized(tokenizer), 4, collate_fn=DataCollatorForSeq2Seq(tokenizer)):
    loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
model.save_pretrained(f"{output}/model")
write_losses(output, losses)
