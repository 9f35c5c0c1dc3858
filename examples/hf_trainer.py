"""Hugging Face's Trainer, saving at every step without waiting; kill it and run it again: it goes on where it was.

python examples/hf_trainer.py
torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import stillframe

OUT = sys.argv[1] if len(sys.argv) > 1 else "runs/hf_trainer"

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256,
        attention_dropout=0.1, bos_token_id=0, eos_token_id=0,
    )
)  # fmt: skip
texts = [torch.randint(256, (32,)) for _ in range(64)]
arguments = TrainingArguments(
    OUT, max_steps=20, save_steps=1, save_total_limit=3, per_device_train_batch_size=4, dataloader_num_workers=2,
    learning_rate=1e-3, logging_steps=5, report_to=[], use_cpu=True, dataloader_pin_memory=False, disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": text, "labels": text} for text in texts])

stillframe.integrations.transformers.install(trainer)  # the one line
trainer.train(resume_from_checkpoint=True)  # also the first time

if trainer.is_world_process_zero():
    newest = max(Path(OUT).glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    AutoModelForCausalLM.from_pretrained(newest)
    print(f"{newest} opens; see `stillframe list {OUT}/_stillframe`")
