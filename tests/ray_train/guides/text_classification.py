"""A Transformers model that reads its batches from a shard of Ray Data, and is evaluated."""

import json
import os

import numpy as np
import ray
import ray.train
import ray.train.huggingface.transformers
import torch
from ray.train.torch import TorchTrainer
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


def sentences(count, seed):
    """Sentences of word numbers; the label is whether the first word is one of the upper half."""
    words = np.random.default_rng(seed).integers(1, 20, size=(count, 6))
    return [{"input_ids": row, "labels": int(row[0] >= 10)} for row in words]


def accuracy(prediction):
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": float(right.mean())}


def train_func():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    args = TrainingArguments(
        output_dir="output",
        max_steps=16,
        eval_strategy="steps",
        eval_steps=8,
        save_strategy="steps",
        save_steps=8,
        logging_steps=8,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=args,
        train_dataset=ray.train.get_dataset_shard("train").iter_torch_batches(batch_size=8),
        eval_dataset=ray.train.get_dataset_shard("evaluation").iter_torch_batches(batch_size=8),
        compute_metrics=accuracy,
    )
    trainer.add_callback(ray.train.huggingface.transformers.RayTrainReportCallback())
    trainer = ray.train.huggingface.transformers.prepare_trainer(trainer)
    trainer.train()


# Tasks of Ray Data run beside the workers.
ray.init(num_cpus=4)
trainer = TorchTrainer(
    train_func,
    scaling_config=ray.train.ScalingConfig(num_workers=2),
    datasets={
        "train": ray.data.from_items(sentences(128, 0)),
        "evaluation": ray.data.from_items(sentences(32, 1)),
    },
    run_config=ray.train.RunConfig(
        name="text",
        storage_path=os.path.abspath("storage"),
        checkpoint_config=ray.train.CheckpointConfig(
            num_to_keep=1, checkpoint_score_attribute="eval_accuracy", checkpoint_score_order="max"
        ),
    ),
)
result = trainer.fit()
with result.checkpoint.as_directory() as directory:
    name = ray.train.huggingface.transformers.RayTrainReportCallback.CHECKPOINT_NAME
    model = BertForSequenceClassification.from_pretrained(os.path.join(directory, name))
summary = {
    "step": result.metrics["step"],
    "evaluated": "eval_accuracy" in result.metrics,
    "labels": model.config.num_labels,
}
print("RESULT", json.dumps(summary))
