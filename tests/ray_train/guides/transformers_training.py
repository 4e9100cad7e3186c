"""A Transformers Trainer inside TorchTrainer; the model is made from its configuration."""

import json
import os

import ray.train.huggingface.transformers
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        tokens = (torch.arange(8) + index) % 16
        return {"input_ids": tokens, "labels": tokens}


def train_func():
    torch.manual_seed(0)
    size = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    trainer = Trainer(
        model=GPT2LMHeadModel(size),
        args=TrainingArguments(
            output_dir="output",
            num_train_epochs=2,
            per_device_train_batch_size=4,
            save_strategy="epoch",
            logging_strategy="epoch",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=Numbers(),
    )
    trainer.add_callback(ray.train.huggingface.transformers.RayTrainReportCallback())
    trainer = ray.train.huggingface.transformers.prepare_trainer(trainer)
    trainer.train()


trainer = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="transformers", storage_path=os.path.join(os.getcwd(), "storage")),
)
metrics = trainer.fit().metrics
print(
    "RESULT",
    json.dumps({"step": metrics["step"], "epoch": metrics["epoch"], "loss": metrics["loss"]}),
)
