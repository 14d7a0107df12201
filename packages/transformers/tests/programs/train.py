"""A program that trains with transformers' Trainer, its own or with a strategy, and writes what it has logged.

    python train.py OUT STRATEGY DEVICES '{"name": {"learning_rate": 0.1}}'

STRATEGY is ``own`` for the Trainer itself, in this process or under torchrun.  The last argument has one training after
the other: arguments of TrainingArguments, and those of ``train`` below.
"""

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

OUT, STRATEGY, DEVICES = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

if STRATEGY != "own":
    import dstrat_transformers

    dstrat_transformers.use(
        STRATEGY, accelerator="cpu", devices=DEVICES, max_restarts=int(os.environ.get("RESTARTS", "0"))
    )

import numpy as np  # noqa: E402 - the process that starts others needs none of these
import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

Trainer = transformers.Trainer if STRATEGY == "own" else dstrat_transformers.DstratTrainer

DEFAULTS = {
    "num_train_epochs": 2,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "warmup_steps": 2,
    "lr_scheduler_type": "cosine",
    "logging_steps": 1,
    "eval_strategy": "epoch",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "seed": 3,
}


def rows(number):
    """Sequences of which different numbers of tokens count."""
    made = []
    for index in range(number):
        tokens = torch.randint(3, 64, (12,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        labels[3 + index % 9 :] = -100
        made.append({"input_ids": tokens, "labels": labels})
    return made


class Stream(torch.utils.data.IterableDataset):
    """Sequences whose number is not known."""

    def __init__(self, number):
        self.number = number

    def __iter__(self):
        return iter(rows(self.number))


def shortened(row, length):
    return {name: value[:length] for name, value in row.items()}


def pad(samples):
    """Return a batch of sequences of different lengths."""

    def stacked(name, value):
        tensors = (torch.as_tensor(sample[name]) for sample in samples)
        return torch.stack([torch.nn.functional.pad(one, (0, 12 - len(one)), value=value) for one in tensors])

    batch = {"input_ids": stacked("input_ids", 0), "labels": stacked("labels", -100)}
    return {**batch, "attention_mask": (batch["input_ids"] != 0).long()}


def llama(**changes):
    torch.manual_seed(1)
    values = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**values, **changes}))


def with_adapters(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


class Events(transformers.TrainerCallback):
    def __init__(self):
        self.names = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.names.append("train_begin")

    def on_save(self, args, state, control, **kwargs):
        self.names.append(f"save {state.global_step}")

    def on_train_end(self, args, state, control, **kwargs):
        self.names.append("train_end")


class Dies(transformers.TrainerCallback):
    """Kills the last process at the end of a step, once."""

    def __init__(self, step, mark):
        self.step, self.mark = step, mark

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and args.process_index == args.world_size - 1 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class OutOfMemory(torch.autograd.Function):
    """Identity whose backward pass runs out of memory."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory.")


def run_out_of_memory(model, passes, call):
    """Let the forward or the backward pass of one of the calls with gradients fail."""
    calls = 0

    def fail(layer, args, output):
        nonlocal calls
        calls += torch.is_grad_enabled()
        if calls != call or not torch.is_grad_enabled():
            return output
        if passes == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return OutOfMemory.apply(output)

    model.model.layers[0].register_forward_hook(fail)


def loss_of(outputs, labels, num_items_in_batch=None):
    """Return a loss that is not the model's: larger for labels with large numbers."""
    logits, labels = outputs.logits[:, :-1], labels[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    return (losses * (1 + labels.clamp(min=0) / 64)).sum() / num_items_in_batch


def accuracy(prediction):
    predicted = np.argmax(prediction.predictions[:, :-1], axis=-1)
    labels = prediction.label_ids[:, 1:]
    return {"accuracy": float((predicted == labels)[labels != -100].mean()), "number": int((labels != -100).sum())}


def counted(metrics):
    """Return the numbers of steps and samples of which these metrics have the rates."""
    kinds = [name.removesuffix("steps_per_second") for name in metrics if name.endswith("_steps_per_second")]
    names = [(f"{kind}runtime", f"{kind}{unit}_per_second") for kind in kinds for unit in ("steps", "samples")]
    return [round(metrics[runtime] * metrics[rate]) for runtime, rate in names]


def stream(trainer):
    return {
        name: tensor.clone() for name, tensor in dstrat_transformers.stream_pretrained(trainer.model, trainer.strategy)
    }


def is_saved(weights, path):
    saved = load_file(path)
    return weights.keys() == saved.keys() and all(torch.equal(weights[name], saved[name]) for name in saved)


def train(
    folder,
    *,
    resume=None,
    adapters=False,
    evaluates_first=False,
    trainings=1,
    config=None,
    failing=None,
    has_loss=False,
    is_ragged=False,
    evaluates_stream=False,
    dies_at=None,
    **options,
):
    model = llama(**(config or {}))
    if failing:
        run_out_of_memory(model, *failing)
    events = Events()
    trainer = Trainer(
        model=with_adapters(model) if adapters else model,
        args=transformers.TrainingArguments(output_dir=str(folder), **{**DEFAULTS, **options}),
        train_dataset=[shortened(row, 12 - index * 7 % 8) for index, row in enumerate(rows(48))]
        if is_ragged
        else rows(48),
        data_collator=pad if is_ragged else None,
        eval_dataset=Stream(11) if evaluates_stream else rows(16),
        compute_loss_func=loss_of if has_loss else None,
        compute_metrics=accuracy,
        callbacks=[events],
    )
    if dies_at:
        trainer.add_callback(Dies(dies_at, folder / "died"))
        folder.mkdir(exist_ok=True)
        resume = get_last_checkpoint(folder)
    first = trainer.evaluate()["eval_loss"] if evaluates_first else None
    for _ in range(trainings):
        result = trainer.train(resume_from_checkpoint=resume)
    if options.get("report_to"):
        time.sleep(1.1)  # the evaluation has a file of its own, and TensorBoard's are named by the second
    evaluation, prediction = trainer.evaluate(), trainer.predict(rows(7))
    for callback in trainer.callback_handler.callbacks:
        if getattr(callback, "tb_writer", None) is not None:
            callback.tb_writer.close()  # which these programs, that end by os._exit, would not do
    predictions = prediction.predictions
    streamed = {} if STRATEGY == "own" or adapters else stream(trainer)
    trainer.save_model(str(folder / "model"))
    history = trainer.state.log_history
    return {
        "first": first,
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
        "rates": [entry["learning_rate"] for entry in history if "learning_rate" in entry],
        "evaluations": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "accuracy": evaluation["eval_accuracy"],
        "number": evaluation["eval_number"],
        "predicted": list(predictions.shape),
        "sum": float(np.abs(predictions).sum()),
        "events": events.names,
        "training_loss": result.training_loss,
        "world_size": trainer.args.world_size,
        "tokens": trainer.state.num_input_tokens_seen,
        "operations": trainer.state.total_flos,
        "speeds": [counted(metrics) for metrics in (*history, prediction.metrics)],
        "is_streamed": bool(streamed) and is_saved(streamed, folder / "model" / "model.safetensors"),
    }


def main():
    for name, options in json.loads(sys.argv[4]).items():
        result = train(OUT / name, **options)
        if result["world_size"] == 1 or torch.distributed.get_rank() == 0:
            (OUT / name / "result.json").write_text(json.dumps(result))


main()
if STRATEGY == "own":
    sys.stdout.flush()
    os._exit(0)  # a thread of torch's own process group may abort the process while it ends
