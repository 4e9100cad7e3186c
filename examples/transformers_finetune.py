"""A LoRA adapter of a language model, by Transformers' own Trainer: a worker is killed.

pip install '.[transformers]' peft
python examples/transformers_finetune.py
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

from polytrain import FailureConfig, RunConfig, ScalingConfig, get_context, make_trainer

LENGTH, LETTERS = 16, 32
TEXTS = [[(start + place) % LETTERS for place in range(LENGTH)] for start in range(LETTERS)] * 4
"""The alphabet from each of its letters on, as numbers: nothing is downloaded."""


def train(config):
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    from polytrain_torch.transformers import prepare_trainer

    class OneDies(TrainerCallback):
        def on_epoch_begin(self, args, state, control, **_):
            context = get_context()
            is_killed = context.get_world_rank() == 1 and context.get_attempt() == 0
            if round(state.epoch) == 4 and is_killed:
                os.kill(os.getpid(), signal.SIGKILL)

    set_seed(0)
    base = AutoModelForCausalLM.from_pretrained(config["base"])
    adapter = LoraConfig(r=8, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
    trainer = Trainer(
        get_peft_model(base, adapter),
        TrainingArguments(
            output_dir=config["output"],
            num_train_epochs=8,
            per_device_train_batch_size=8,
            learning_rate=3e-2,
            save_strategy="epoch",
            save_total_limit=1,
            logging_strategy="epoch",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=[{"input_ids": text, "labels": text} for text in TEXTS],
        callbacks=[OneDies()],
    )
    prepare_trainer(trainer).train()  # the only added call


def loss_of(model):
    import torch

    texts = torch.tensor(TEXTS)
    return model.eval()(input_ids=texts, labels=texts).loss.item()


def main():
    from peft import PeftModel
    from transformers import GPT2Config, GPT2LMHeadModel, set_seed

    set_seed(0)
    size = GPT2Config(
        vocab_size=LETTERS,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(size)
    with tempfile.TemporaryDirectory() as directory:
        base, output = f"{directory}/base", f"{directory}/output"
        model.save_pretrained(base)
        result = make_trainer(
            "torch",
            train,
            train_loop_config={"base": base, "output": output},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                storage_path=directory, failure_config=FailureConfig(max_failures=1)
            ),
        ).fit()
        before = loss_of(model)
        after = loss_of(PeftModel.from_pretrained(model, result.checkpoint.path))
        size = Path(result.checkpoint.path, "adapter_model.safetensors").stat().st_size
    print(f"{result.restarts} restart, loss {before:.2f} before and {after:.2f} after")
    print(f"the adapter has {size // 1024} KiB, the model {model.num_parameters() * 4 // 1024} KiB")


if __name__ == "__main__":
    main()
