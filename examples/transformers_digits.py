"""Handwritten digits by a vision transformer of Hugging Face's: two workers, one of them killed.

pip install '.[torch]' transformers accelerate datasets scikit-learn
python examples/transformers_digits.py
"""

from __future__ import annotations

import tempfile

from digits import EPOCHS, digits, kill_a_worker, print_result

from polytrain import FailureConfig, RunConfig, ScalingConfig, make_trainer


def train(config):
    from datasets import Dataset
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainingArguments,
        ViTConfig,
        ViTForImageClassification,
        set_seed,
    )

    from polytrain_torch.transformers import prepare_trainer

    class OneDies(TrainerCallback):
        def on_epoch_begin(self, args, state, control, **_):
            kill_a_worker(round(state.epoch))

    class WithWorkers(Trainer):
        def log(self, logs, *args):
            super().log({**logs, "workers": self.args.world_size}, *args)

    set_seed(0)
    (images, shown), _ = digits()
    rows = Dataset.from_dict({"pixel_values": images.reshape(-1, 1, 8, 8), "labels": shown})
    model = ViTForImageClassification(
        ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            num_labels=10,
        )
    )
    trainer = WithWorkers(
        model,
        TrainingArguments(
            output_dir=config["output"],
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            save_strategy="epoch",
            save_total_limit=1,
            logging_strategy="epoch",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=rows.with_format("torch"),
        callbacks=[OneDies()],
    )
    prepare_trainer(trainer).train()  # the only added call


def main():
    import torch
    from transformers import ViTForImageClassification

    with tempfile.TemporaryDirectory() as output:
        result = make_trainer(
            "torch",
            train,
            train_loop_config={"output": output},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(failure_config=FailureConfig(max_failures=1)),
        ).fit()
    model = ViTForImageClassification.from_pretrained(result.checkpoint.path)
    _, (images, _) = digits()
    guesses = model(torch.from_numpy(images).reshape(-1, 1, 8, 8)).logits
    print_result(result, guesses.argmax(1).numpy())


if __name__ == "__main__":
    main()
