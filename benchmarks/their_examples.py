"""Example programs of other libraries with a strategy, beside their own distribution, for docs/other-trainers.md.

The programs are those of clones of the libraries, with tiny models and data that are made here, and without network::

    for name in transformers trl accelerate peft diffusers sentence-transformers; do
        git clone --depth 1 https://github.com/huggingface/$name sources/$name
    done
    pip install trl peft diffusers sentence-transformers evaluate timm torchvision datasets tensorboard
    python benchmarks/their_examples.py sources            # or: ... sources run_glue sft

It prints a row for each: the largest relative difference of the losses of all backward passes in each process from the
unchanged program, in one process and in two of torchrun.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

FUTURE = "from __future__ import annotations\n"
RECORDER = """
import os, sys
import torch
from accelerate import Accelerator
torch.manual_seed(1)  # train_unconditional.py sets no seed
def record(owner):
    backward = owner.backward
    def record_and_run(self, loss, **kwargs):
        with open(f"losses-{os.environ.get('RANK', 0)}", "a") as file:
            print(loss.item(), file=file)
        return backward(self, loss, **kwargs)
    owner.backward = record_and_run
record(Accelerator)
if "dstrat_transformers" in sys.modules:
    record(sys.modules["dstrat_transformers"].DstratAccelerator)
"""
METRIC = """
import datasets
import evaluate
class Metric(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int32"), "references": datasets.Value("int32")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)
    def _compute(self, predictions, references):
        return {"accuracy": sum(a == b for a, b in zip(predictions, references)) / len(references)}
"""
TRANSLATION_METRIC = """
import datasets
import evaluate
class Metric(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("string"),
            "references": datasets.Sequence(datasets.Value("string"))})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)
    def _compute(self, predictions, references):
        return {"score": float(sum(map(len, predictions)))}
"""
WORDS = [f"w{number}" for number in range(60)]
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A program of a library.

    Attributes:
        path: Its file, below the folder of the clones.
        makes: The line that makes the Trainer or the Accelerator, and what replaces it.
        arguments: Of the command line.
        prepare: Writes the models and data that it reads into a folder.
        also: A further replacement, in the unchanged program too.
        aliases: Strategies, beside one device.
    """

    path: str
    makes: tuple[str, str]
    arguments: str
    prepare: Callable[[Path], None]
    also: tuple[str, str] = ("", "")
    aliases: tuple[str, ...] = ("ddp", "fsdp")


# Models and data


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    """Write rows as lines of JSON."""
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def text(seed: int) -> str:
    """Return some words."""
    generator = random.Random(seed)
    return " ".join(generator.choices(WORDS, k=generator.randint(4, 12)))


def write_model(folder: Path, kind: str) -> None:
    """Write a new tiny model with its tokenizer."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(1)
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*special, *WORDS])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names).save_pretrained(
        folder
    )
    of_text = {"vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0, **SMALL}
    if kind == "bert":
        config = transformers.BertConfig(**of_text, hidden_dropout_prob=0.1)
        transformers.BertForMaskedLM(config).save_pretrained(folder)
    elif kind == "llama":
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**of_text)).save_pretrained(folder)
    else:
        sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        config = transformers.T5Config(**sizes, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0)
        transformers.T5ForConditionalGeneration(config).save_pretrained(folder)


def write_images(folder: Path, number: int, size: int, *, name: str = "{label}/{index}.png") -> None:
    """Write images of two labels."""
    import numpy as np
    from PIL import Image

    for index in range(number):
        path = folder / name.format(label="ab"[index % 2], index=index)
        path.parent.mkdir(exist_ok=True, parents=True)
        pixels = np.random.default_rng(index).integers(0, 255, (size, size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)


def write_metric(folder: Path, name: str, source: str = METRIC) -> None:
    """Write a metric where evaluate looks for it."""
    (folder / name).mkdir()
    (folder / name / f"{name}.py").write_text(source, encoding="utf-8")


def for_glue(folder: Path) -> None:
    """Write a BERT and pairs of sentences with two labels."""
    write_model(folder / "bert", "bert")
    write_metric(folder, "accuracy")
    for split, number in (("train", 64), ("validation", 16)):
        rows = [{"sentence1": text(i), "sentence2": text(i + 1), "label": i % 2} for i in range(number)]
        write_rows(folder / f"{split}.json", rows)


def for_clm(folder: Path) -> None:
    """Write a Llama and lines of text."""
    write_model(folder / "llama", "llama")
    write_metric(folder, "accuracy")
    for split, number in (("train", 128), ("validation", 32)):
        (folder / f"{split}.txt").write_text("\n".join(map(text, range(number))), encoding="utf-8")


def for_translation(folder: Path) -> None:
    """Write a T5 and pairs of texts."""
    write_model(folder / "t5", "t5")
    write_metric(folder, "sacrebleu", TRANSLATION_METRIC)
    for split, number in (("train", 64), ("validation", 12)):
        rows: list[dict[str, object]] = [{"translation": {"en": text(i), "ro": text(i + 1)}} for i in range(number)]
        write_rows(folder / f"{split}.json", rows)


def for_images(folder: Path) -> None:
    """Write a ViT and images of two labels."""
    import torch
    import transformers

    torch.manual_seed(1)
    config = transformers.ViTConfig(image_size=16, patch_size=8, **SMALL)
    transformers.ViTForImageClassification(config).save_pretrained(folder / "vit")
    transformers.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder / "vit")
    write_metric(folder, "accuracy")
    write_images(folder / "train", 48, 20)
    write_images(folder / "validation", 16, 20)


def for_sft(folder: Path) -> None:
    """Write a Llama and texts."""
    write_model(folder / "llama", "llama")
    write_rows(folder / "data" / "train.jsonl", [{"text": text(i)} for i in range(64)])


def for_dpo(folder: Path) -> None:
    """Write a Llama and prompts with two answers."""
    write_model(folder / "llama", "llama")
    rows = [{"prompt": text(i) + " ", "chosen": text(i + 100), "rejected": text(i + 200)} for i in range(48)]
    write_rows(folder / "data" / "train.jsonl", rows)


def for_sts(folder: Path) -> None:
    """Write a BERT and pairs of sentences with scores."""
    write_model(folder / "bert", "bert")
    for split, number in (("train", 96), ("validation", 16), ("test", 16)):
        rows = [{"sentence1": text(i), "sentence2": text(i + 1), "score": i % 7 / 6} for i in range(number)]
        write_rows(folder / "sentence-transformers" / "stsb" / f"{split}.jsonl", rows)


def for_nlp(folder: Path) -> None:
    """Write a BERT and the data set of the program."""
    write_model(folder / "bert-base-cased", "bert")
    write_metric(folder, "glue")
    data = folder / "nyu-mll" / "glue"
    for split, number in (("train", 96), ("validation", 20)):
        rows = [{"sentence1": text(i), "sentence2": text(i + 1), "label": i % 2, "idx": i} for i in range(number)]
        write_rows(data / "mrpc" / f"{split}.jsonl", rows)
    header = "---\nconfigs:\n- config_name: mrpc\n  data_dir: mrpc\n---\n"
    (data / "README.md").write_text(header, encoding="utf-8")


def for_cv(folder: Path) -> None:
    """Write images, and the weights that the program downloads."""
    import timm
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(1)
    write_images(folder / "pets", 80, 32, name="{label}_{index}.jpg")
    model = timm.create_model("resnet50d", pretrained=False)
    # In the cache of the hub, where the program finds what it would have downloaded.
    cache = folder / "home" / "hub" / f"models--{model.pretrained_cfg['hf_hub_id'].replace('/', '--')}"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("made", encoding="utf-8")
    (cache / "snapshots" / "made").mkdir(parents=True)
    save_file(model.state_dict(), cache / "snapshots" / "made" / "model.safetensors")


def for_olora(folder: Path) -> None:
    """Write a Llama and instructions with answers."""
    write_model(folder / "llama", "llama")
    rows: list[dict[str, object]] = [{"instruction": text(i), "output": text(i + 1)} for i in range(72)]
    write_rows(folder / "data" / "train.jsonl", rows)


def for_diffusion(folder: Path) -> None:
    """Write the configuration of a UNet and images."""
    from diffusers import UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    model = UNet2DModel(sample_size=8, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1, **blocks)
    model.save_config(folder / "unet")
    write_images(folder / "images", 32, 12, name="{index}.png")


TRAINER = ("trainer = Trainer(", "trainer = dstrat_transformers.DstratTrainer(")
SEQ2SEQ = ("trainer = Seq2SeqTrainer(", "trainer = dstrat_transformers.with_strategy(Seq2SeqTrainer)(")
ACCELERATOR = ("accelerator = Accelerator(", "accelerator = dstrat_transformers.DstratAccelerator(")
SHORT = "--output_dir out --do_train --do_eval --per_device_train_batch_size 4 --max_steps 6 --learning_rate 1e-3"
OF_TRL = "--dataset_name data --output_dir out --per_device_train_batch_size 4 --max_steps 6 --learning_rate 1e-3"
EXAMPLES = (
    Example(
        path="transformers/examples/pytorch/text-classification/run_glue.py",
        makes=TRAINER,
        arguments=f"--model_name_or_path bert --train_file train.json --validation_file validation.json {SHORT}",
        prepare=for_glue,
    ),
    Example(
        path="transformers/examples/pytorch/language-modeling/run_clm.py",
        makes=TRAINER,
        arguments="--model_name_or_path llama --train_file train.txt --validation_file validation.txt --block_size 16 "
        + SHORT,
        prepare=for_clm,
    ),
    Example(
        path="transformers/examples/pytorch/translation/run_translation.py",
        makes=SEQ2SEQ,
        arguments="--model_name_or_path t5 --train_file train.json --validation_file validation.json --source_lang en "
        f"--target_lang ro --predict_with_generate --max_target_length 16 {SHORT}",
        prepare=for_translation,
    ),
    Example(
        path="transformers/examples/pytorch/image-classification/run_image_classification.py",
        makes=TRAINER,
        arguments="--model_name_or_path vit --train_dir train --validation_dir validation --label_column_name label "
        f"--remove_unused_columns false {SHORT}",
        prepare=for_images,
    ),
    Example(
        path="trl/trl/scripts/sft.py",
        makes=("trainer = SFTTrainer(", "trainer = dstrat_transformers.with_strategy(SFTTrainer)("),
        arguments=f"--model_name_or_path llama --bf16 false {OF_TRL}",
        prepare=for_sft,
    ),
    Example(
        path="trl/trl/scripts/dpo.py",
        makes=("trainer = DPOTrainer(", "trainer = dstrat_transformers.with_strategy(DPOTrainer)("),
        arguments=f"--model_name_or_path llama --bf16 false {OF_TRL}",
        prepare=for_dpo,
    ),
    Example(
        path="sentence-transformers/examples/sentence_transformer/training/sts/training_stsbenchmark.py",
        makes=(
            "trainer = SentenceTransformerTrainer(",
            "trainer = dstrat_transformers.with_strategy(SentenceTransformerTrainer)(",
        ),
        arguments="bert",
        prepare=for_sts,
        also=("fp16=True", "fp16=False"),
        aliases=("ddp_find_unused_parameters_true", "fsdp"),
    ),
    Example(
        path="accelerate/examples/nlp_example.py",
        makes=ACCELERATOR,
        arguments="--cpu",
        prepare=for_nlp,
    ),
    Example(
        path="accelerate/examples/cv_example.py",
        makes=ACCELERATOR,
        arguments="--cpu --data_dir pets",
        prepare=for_cv,
    ),
    Example(
        path="peft/examples/olora_finetuning/olora_finetuning.py",
        makes=("trainer = transformers.Trainer(", "trainer = dstrat_transformers.DstratTrainer("),
        arguments="--base_model llama --data_path data --dtype float32 --device_map cpu --batch_size 4 "
        "--val_set_size 8 --lora_target_modules .*q_proj --seed 1",
        prepare=for_olora,
    ),
    Example(
        path="diffusers/examples/unconditional_image_generation/train_unconditional.py",
        makes=ACCELERATOR,
        arguments="--train_data_dir images --model_config_name_or_path unet --resolution 8 --num_epochs 2 "
        "--output_dir out --train_batch_size 4 --ddpm_num_steps 20 --ddpm_num_inference_steps 2 --save_images_epochs 5 "
        "--lr_warmup_steps 0",
        prepare=for_diffusion,
        aliases=("ddp",),
    ),
)


# Runs


def run(example: Example, source: str, inputs: Path, folder: Path, alias: str, devices: int) -> list[list[float]]:
    """Run the program in new processes, and return the losses of each; ``alias`` is empty for the unchanged program."""
    shutil.copytree(inputs, folder)
    begin = "import record_losses\n"
    source = source.replace(*example.also) if example.also[0] else source
    if alias:
        begin = f"import dstrat_transformers\ndstrat_transformers.use({alias!r}, devices={devices})\n" + begin
        if example.makes[0] not in source:
            sys.exit(f"{example.path} has no line {example.makes[0]!r}: another version of it has been tried")
        source = source.replace(*example.makes)
    source = FUTURE + begin + source.replace(FUTURE, "") if FUTURE in source else begin + source
    (folder / "program.py").write_text(source, encoding="utf-8")
    (folder / "record_losses.py").write_text(RECORDER, encoding="utf-8")
    start = ["-m", "torch.distributed.run", f"--nproc-per-node={devices}"] if devices > 1 and not alias else []
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    environ |= {"HF_HOME": str(folder / "home"), "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    with (folder / "printed").open("w", encoding="utf-8") as output:
        ended = subprocess.run(
            [sys.executable, *start, "program.py", *example.arguments.split()],
            cwd=folder,
            env=environ,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    files = [folder / f"losses-{rank}" for rank in range(devices)]
    if ended.returncode or not all(file.exists() for file in files):
        sys.exit((folder / "printed").read_text(encoding="utf-8")[-4000:])
    return [[float(line) for line in file.read_text(encoding="utf-8").split()] for file in files]


def difference(own: list[list[float]], seen: list[list[float]]) -> str:
    """Return the largest relative difference of two runs' losses."""
    if [len(losses) for losses in own] != [len(losses) for losses in seen]:
        return f"{[len(losses) for losses in seen]} losses, and {[len(losses) for losses in own]} of its own"
    pairs = [pair for ranks in zip(own, seen, strict=True) for pair in zip(*ranks, strict=True)]
    if any(math.isnan(loss) for pair in pairs for loss in pair):
        return "nan"
    largest = max(abs(one - other) / max(abs(one), 1e-12) for one, other in pairs)
    return f"{largest:.0e}" if largest else "0"


def main(sources: Path, names: list[str]) -> None:
    """Run the examples, or those of some names, and print their rows."""
    print("| example | losses | one device | ddp | fsdp |\n|---|--:|--:|--:|--:|")
    for example in EXAMPLES:
        path = sources / example.path
        if names and path.stem not in names:
            continue
        source = path.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            (folder / "inputs").mkdir()
            example.prepare(folder / "inputs")
            own = [run(example, source, folder / "inputs", folder / f"own-{n}", "", n) for n in (1, 2)]
            cells = [difference(own[0], run(example, source, folder / "inputs", folder / "one", "single_device", 1))]
            for alias in example.aliases:
                seen = run(example, source, folder / "inputs", folder / alias, alias, 2)
                cells.append(difference(own[1], seen) + ("" if alias in {"ddp", "fsdp"} else f" ({alias})"))
        print(f"| {path.name} | {len(own[1][0])} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
