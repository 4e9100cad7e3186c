"""Scripts of TRL, PEFT, FSDP2 and Accelerate, killed: nothing of what they learn or read changes.

Each fine-tunes a tiny Llama with random weights on two workers, as its library's guide shows it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e import torch_runs
from tests.e2e.losses import lose_all_ranks
from tests.e2e.torch_runs import DEEPSPEED, equal
from tests.sweeps import only_in_sweep

from polytrain import FailureConfig, Result, RunConfig

ROWS, EPOCHS = 32, 2
LETTERS = "abcdefghijklmnop"


class Recorder:
    """Notes the rows of each step in a file of the rank, and kills worker processes.

    `config["kills"]` has for each attempt a place in a step, the ranks and the step, from 1.
    """

    def __init__(self, config: Mapping[str, Any], step: Callable[[], int]) -> None:
        """
        Args:
            config: the training function's.
            step: returns the current step.
        """
        import polytrain

        context = polytrain.get_context()
        self._rank, self._attempt = context.get_world_rank(), context.get_attempt()
        self._file = Path(config["rows"], str(self._rank))
        kills = config["kills"]
        self._kill = kills[self._attempt] if self._attempt < len(kills) else None
        self._step = step

    def at(self, place: str) -> None:
        import os
        import signal

        if self._kill is None or [place, self._step()] != [self._kill[0], self._kill[2]]:
            return
        if len(self._kill[1]) > 1:
            lose_all_ranks()
        if self._rank in self._kill[1]:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, model: Any) -> None:
        """Note the rows of each batch in training: their first tokens are their own."""

        def before_forward(model: Any, args: Any, options: Any) -> None:
            if not model.training:
                return
            tokens = options["input_ids"] if "input_ids" in options else args[0]
            rows = [token for token in tokens.flatten().tolist() if token < ROWS]
            with self._file.open("a") as file:
                json.dump([self._attempt, self._step(), rows], file)
                file.write("\n")
            self.at("forward")

        model.register_forward_pre_hook(before_forward, with_kwargs=True)


def llama() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            attention_dropout=0.1,
            bos_token_id=None,
            eos_token_id=62,
            pad_token_id=63,
        )
    )


def tokenizer() -> Any:
    """Words are the rows' names, which are the lowest numbers, and letters."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = [*(f"row{number}" for number in range(ROWS)), *LETTERS]
    known = {word: number for number, word in enumerate(words)} | {"<eos>": 62, "<pad>": 63}
    model = Tokenizer(WordLevel(known, unk_token="<pad>"))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>", pad_token="<pad>")


def text(row: int) -> str:
    """Texts have several lengths."""
    return " ".join(LETTERS[(row + place) % len(LETTERS)] for place in range(3 + row % 5))


def dies_in_steps(recorder: Recorder) -> Any:
    """The callback that kills a worker process of a Trainer."""
    from transformers import TrainerCallback

    class Dies(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            recorder.at("optimizer")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            # The trainer has counted the step by then.
            recorder.at("end")

    return Dies()


ARGUMENTS = {
    "num_train_epochs": EPOCHS,
    "save_steps": 3,
    # So a checkpoint may be made between two logs.
    "logging_steps": 2,
    "report_to": [],
    "disable_tqdm": True,
    "learning_rate": 1e-2,
    "use_cpu": True,
}


def trains(config: dict[str, Any], make: Callable[[dict[str, Any]], Any]) -> None:
    """Train with a Trainer that `make` makes."""
    from polytrain_torch.transformers import prepare_trainer

    trainer = make(config)
    recorder = Recorder(config, lambda: trainer.state.global_step + 1)
    recorder.watch(trainer.model)
    trainer.add_callback(dies_in_steps(recorder))
    prepare_trainer(trainer).train()


def sft(config: dict[str, Any]) -> None:
    def make(config: dict[str, Any]) -> Any:
        from datasets import Dataset
        from peft import LoraConfig
        from trl import SFTConfig, SFTTrainer

        return SFTTrainer(
            llama(),
            SFTConfig(
                output_dir=config["output"],
                packing=True,
                max_length=30,
                per_device_train_batch_size=1,
                dataset_num_proc=None,
                **ARGUMENTS,
            ),
            train_dataset=Dataset.from_list(
                [{"text": f"row{row} {text(row)}"} for row in range(ROWS)]
            ),
            processing_class=tokenizer(),
            peft_config=LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]),
        )

    trains(config, make)


def dpo(config: dict[str, Any]) -> None:
    def make(config: dict[str, Any]) -> Any:
        from datasets import Dataset
        from peft import LoraConfig
        from trl import DPOConfig, DPOTrainer

        return DPOTrainer(
            llama(),
            args=DPOConfig(
                output_dir=config["output"],
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                **ARGUMENTS,
            ),
            train_dataset=Dataset.from_list(
                [
                    {
                        "prompt": f"row{row}",
                        "chosen": " " + text(row),
                        "rejected": " " + text(row + 3),
                    }
                    for row in range(ROWS)
                ]
            ),
            processing_class=tokenizer(),
            peft_config=LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]),
        )

    trains(config, make)


def batches(**options: Any) -> Any:
    """The rows in batches of 4, padded."""
    from torch.utils.data import DataLoader
    from transformers import DataCollatorForLanguageModeling

    words = tokenizer()
    return DataLoader(
        [words(f"row{row} {text(row)}") for row in range(ROWS)],
        batch_size=4,
        shuffle=True,
        collate_fn=DataCollatorForLanguageModeling(words, mlm=False),
        **options,
    )


def adapter(config: dict[str, Any]) -> None:
    import torch
    from peft import (
        LoraConfig,
        get_peft_model,
        get_peft_model_state_dict,
        set_peft_model_state_dict,
    )

    import polytrain
    from polytrain_torch import TrainingState, prepare_data_loader, prepare_model

    chosen = LoraConfig(
        r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]
    )
    inner = get_peft_model(llama(), chosen)

    class Adapter:
        def state_dict(self) -> Any:
            return get_peft_model_state_dict(inner)

        def load_state_dict(self, state: Any) -> None:
            set_peft_model_state_dict(inner, state)

    loader = prepare_data_loader(batches())
    model = prepare_model(inner)
    optimizer = torch.optim.AdamW(filter(lambda each: each.requires_grad, inner.parameters()), 1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
    recorder = Recorder(config, lambda: scheduler.last_epoch + 1)
    recorder.watch(inner)
    state = TrainingState(model=Adapter(), optimizer=optimizer, scheduler=scheduler)
    done = state.restore()
    for epoch in range(done.get("epoch", 0), EPOCHS):
        for batch in loader:
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            recorder.at("optimizer")
            optimizer.step()
            recorder.at("end")
            scheduler.step()
            if scheduler.last_epoch % 3 == 0 or scheduler.last_epoch == 8:
                state.report({"loss": loss}, epoch=epoch)
            else:
                polytrain.report({"loss": loss.item()})


def fsdp2(config: dict[str, Any]) -> None:
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    import polytrain
    from polytrain_torch import TrainingState, prepare_data_loader

    model = llama()
    recorder = Recorder(config, lambda: scheduler.last_epoch + 1)
    recorder.watch(model)
    loader = prepare_data_loader(batches())
    # Activation checkpointing runs a layer twice, and the first time would fill the cache.
    model.config.use_cache = False
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = model.model.layers
    for number, layer in enumerate(layers):
        layers[number] = fully_shard(checkpoint_wrapper(layer), mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
    state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler)
    done = state.restore()
    for epoch in range(done.get("epoch", 0), EPOCHS):
        for batch in loader:
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
            recorder.at("optimizer")
            optimizer.step()
            recorder.at("end")
            scheduler.step()
            metrics = {"loss": loss.item(), "norm": norm.item()}
            if scheduler.last_epoch % 3 == 0 or scheduler.last_epoch == 8:
                state.report(metrics, epoch=epoch)
            else:
                polytrain.report(metrics)


def accelerated(config: dict[str, Any]) -> None:
    import torch
    from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches

    import polytrain
    from polytrain_torch.accelerate import report, restore

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    inner = llama()
    recorder = Recorder(config, lambda: step)
    recorder.watch(inner)
    # With a generator of its own, a new iterator draws no number of torch's.
    generator = torch.Generator() if config["has_generator"] else None
    model, optimizer, loader = accelerator.prepare(
        inner, torch.optim.AdamW(inner.parameters(), 1e-2), batches(generator=generator)
    )
    done = restore(accelerator)
    first, skipped = done.get("epoch", 0), done.get("batches", 0)
    for epoch in range(first, EPOCHS):
        loader.set_epoch(epoch)
        again = skipped if epoch == first else 0
        for number, batch in enumerate(skip_first_batches(loader, again), again + 1):
            step = epoch * len(loader) + number
            loss = model(**batch).loss
            optimizer.zero_grad()
            accelerator.backward(loss)
            recorder.at("optimizer")
            optimizer.step()
            recorder.at("end")
            if step % 3 == 0 or step == 8:
                report(accelerator, {"loss": loss}, epoch=epoch, batches=number)
            else:
                polytrain.report({"loss": loss.item()})


def batch_norm(config: dict[str, Any]) -> None:
    """Train an adapter of a model whose statistics training changes, and PEFT doesn't save."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

    import polytrain
    from polytrain_torch.transformers import prepare_trainer

    class Regression(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.first, self.norm = torch.nn.Linear(3, 64), torch.nn.BatchNorm1d(64)
            self.second, self.last = torch.nn.Linear(64, 256), torch.nn.Linear(256, 1)
            self.post_init()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            predicted = self.last(self.second(self.norm(self.first(x))))[:, 0]
            return {"loss": (predicted - labels).square().mean(), "logits": predicted}

    torch.manual_seed(3)
    inner = Regression(PretrainedConfig())
    x = torch.arange(3.0 * ROWS).reshape(ROWS, 3) / ROWS
    arguments = TrainingArguments(
        output_dir=config["output"],
        per_device_train_batch_size=4,
        label_names=["labels"],
        ddp_broadcast_buffers=config["broadcasts"],
        **ARGUMENTS,
    )
    trainer = Trainer(
        get_peft_model(inner, LoraConfig(r=1, target_modules=["second", "last"])),
        arguments,
        train_dataset=[{"x": row, "labels": row.sum()} for row in x],
    )
    recorder = Recorder(config, lambda: trainer.state.global_step + 1)
    trainer.add_callback(dies_in_steps(recorder))
    prepare_trainer(trainer).train()
    rank = polytrain.get_context().get_world_rank()
    torch.save(inner.state_dict(), f"{config['output']}/weights-{rank}.pt")


SCRIPTS = {
    "sft": sft,
    "dpo": dpo,
    "adapter": adapter,
    "fsdp2": fsdp2,
    "accelerated": accelerated,
    "batch_norm": batch_norm,
}

LIBRARIES = (
    *(DEEPSPEED, "transformers", "datasets", "peft", "trl.trainer.sft_trainer"),
    *("trl.trainer.dpo_trainer", "polytrain_torch.transformers", "polytrain_torch.accelerate"),
)

OF_TIME = ("_runtime", "_per_second")

Kill = tuple[str, list[int], int]
"""A place in a step, the ranks that are killed there, and the step."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What is to be the same in a run that was killed."""

    result: Result
    reports: list[dict[str, Any]]
    """All that was reported, but for times."""

    rows: dict[tuple[int, int], list[list[int]]]
    """Rank and step to the rows of each batch, in the last attempt that took the step."""


def trained(directory: Path, script: str, kills: Sequence[Kill] = (), **options: Any) -> Trained:
    rows = directory / "rows"
    rows.mkdir(parents=True)
    config = {
        "output": str(directory / "output"),
        "rows": str(rows),
        "kills": kills,
        "has_generator": True,
        **options,
    }
    result = torch_runs.fit(
        RunConfig(storage_path=directory / "runs", progress=False),
        SCRIPTS[script],
        config,
        libraries=LIBRARIES,
        failure_config=FailureConfig(max_failures=len(kills)),
    )
    assert result.restarts == len(kills)
    reports = [
        {name: each for name, each in report.items() if not name.endswith(OF_TIME)}
        for report in result.history
    ]
    return Trained(result=result, reports=reports, rows=rows_in(rows))


def rows_in(directory: Path) -> dict[tuple[int, int], list[list[int]]]:
    by_attempt: dict[tuple[int, int], dict[int, list[list[int]]]] = {}
    for file in directory.iterdir():
        for line in file.read_text().splitlines():
            attempt, step, rows = json.loads(line)
            steps = by_attempt.setdefault((int(file.name), step), {})
            steps.setdefault(attempt, []).append(rows)
    return {step: attempts[max(attempts)] for step, attempts in by_attempt.items()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    @cache
    def of(script: str) -> Trained:
        return trained(tmp_path_factory.mktemp(script), script)

    return of


KILLS: dict[str, list[Kill]] = {
    # One that leaves the other rank its state, and one of both ranks between two checkpoints.
    "sft": [("optimizer", [0], 4), ("end", [0, 1], 6), ("forward", [1], 8)],
    "dpo": [("end", [0, 1], 5), ("forward", [1], 7), ("optimizer", [0], 8)],
    "adapter": [("forward", [1], 5), ("end", [0, 1], 7), ("optimizer", [0], 8)],
    "fsdp2": [("optimizer", [0], 5), ("forward", [1], 6), ("end", [0, 1], 8)],
    "accelerated": [("end", [1], 3), ("forward", [0], 6), ("optimizer", [1], 8)],
}

IN_TEST = ("sft",)
"""For `make test`: packed rows of a Trainer. Other tests kill adapters, below, FSDP2, in
`test_torch_rank_states`, and loops that skip batches, in `test_accelerate_loaders`."""


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("script", "kills"),
    [
        *(
            pytest.param(script, kills[:1], id=script)
            if script in IN_TEST
            else only_in_sweep(script, kills[:1], id=script)
            for script, kills in KILLS.items()
        ),
        *(
            only_in_sweep(script, kills, id=f"{script}, three times")
            for script, kills in KILLS.items()
        ),
    ],
)
def test_a_killed_script_learns_the_same_from_the_same_rows(
    tmp_path: Path, undisturbed: Callable[[str], Trained], script: str, kills: list[Kill]
) -> None:
    expected, killed = undisturbed(script), trained(tmp_path, script, kills)
    assert killed.reports == expected.reports
    assert killed.rows == expected.rows
    # DPO's model has each prompt twice, and once more without the adapter.
    seen = Counter(row for batches in killed.rows.values() for row in {*chain(*batches)})
    assert seen == dict.fromkeys(range(ROWS), EPOCHS)
    if script in ADAPTERS:
        check_weights(killed.result, ADAPTERS[script])


ADAPTERS = {script: "adapter_model.safetensors" for script in ("sft", "dpo")}
ADAPTERS |= {"adapter": "model.pt"}
"""The file with all weights that a checkpoint has."""


def check_weights(result: Result, name: str) -> None:
    """Check that no checkpoint has more weights than the adapter's, a survivor's included."""
    whole = sum(4 * each.numel() for each in llama().parameters())
    directories = [*Path(result.path, "checkpoints").iterdir()]
    assert len(directories) > 1
    for directory in directories:
        sizes = {
            each.name: each.stat().st_size
            for each in directory.iterdir()
            if re.match("(adapter_|pytorch_)?model", each.name)
        }
        assert sizes.pop(name) < whole / 10
        assert sizes == {}


@pytest.mark.sweep
@pytest.mark.only_in_sweep
def test_a_loader_without_a_generator_leaves_dropout_its_numbers(tmp_path: Path) -> None:
    """An iterator of such a loader draws a number of torch's; one after a restart draws none."""
    kills = KILLS["accelerated"][1:2]
    expected = trained(tmp_path / "undisturbed", "accelerated", has_generator=False)
    killed = trained(tmp_path / "killed", "accelerated", kills, has_generator=False)
    assert killed.rows == expected.rows
    assert killed.reports == expected.reports


@pytest.mark.sweep
@pytest.mark.parametrize("broadcasts", [False, only_in_sweep(True)])
def test_statistics_of_an_adapted_model_come_back(tmp_path: Path, broadcasts: bool) -> None:
    """Those that each rank has of its own, too."""
    # The second kill leaves a state to the other rank, the first one doesn't.
    kills: list[Kill] = [("end", [0, 1], 6), ("optimizer", [1], 7)]
    expected = trained(tmp_path / "undisturbed", "batch_norm", broadcasts=broadcasts)
    killed = trained(tmp_path / "killed", "batch_norm", kills, broadcasts=broadcasts)
    assert killed.reports == expected.reports
    for name in ("weights-0.pt", "weights-1.pt"):
        theirs, ours = (
            torch.load(tmp_path / run / "output" / name, weights_only=True)
            for run in ("undisturbed", "killed")
        )
        assert equal(ours, theirs)
    frozen = sum(4 * each.numel() for name, each in ours.items() if "base_layer" in name)
    for directory in Path(killed.result.path, "checkpoints").iterdir():
        assert (directory / "adapter_model.safetensors").exists()
        assert max(file.stat().st_size for file in directory.iterdir()) < frozen / 2
