"""Data of Hugging Face datasets: divided between ranks, and resumed exactly."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="this environment has no transformers: nox -s neighbours has")
pytest.importorskip("datasets", reason="this environment has no datasets: nox -s neighbours has")

import datasets
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from dstrat.callbacks import ModelCheckpoint
from dstrat.errors import MisuseError
from dstrat_transformers import SplitIterableDataset

sys.path.insert(0, str(Path(__file__).parent))

import small

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("transformers")]


def table():
    rows = [{name: value.tolist() for name, value in row.items()} for row in small.rows()]
    return datasets.Dataset.from_list(rows).with_format("torch")


def stream(shards=3):
    return table().to_iterable_dataset(num_shards=shards).with_format("torch")


def loader(dataset, batch_size, *, stateful=False):
    if stateful:
        stateful_loader = pytest.importorskip("torchdata.stateful_dataloader", reason="there is no torchdata")
        return stateful_loader.StatefulDataLoader(dataset, batch_size=batch_size)
    return DataLoader(dataset, batch_size=batch_size)


def test_a_table_is_divided_as_any_dataset(tmp_path):
    one = small.train(tmp_path / "one", data=loader(table(), 8))
    two = small.train(tmp_path / "two", "ddp_fork", 2, data=loader(table(), 4))
    plain = small.train(tmp_path / "plain", data=loader(small.rows(), 8))
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-6)
    assert one["losses"] == plain["losses"]


def test_a_stream_is_divided_and_every_example_is_read_once(tmp_path):
    one = small.train(tmp_path / "one", data=loader(stream(), 8), num_training_steps=12)
    split = loader(SplitIterableDataset(stream()), 4)
    two = small.train(tmp_path / "two", "ddp_fork", 2, data=split, num_training_steps=12)
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-6)
    parts = [
        SplitIterableDataset(stream(4)).divided(rank=rank, num_replicas=2, batch_size=4, pads=True) for rank in (0, 1)
    ]
    read = [tuple(row["input_ids"].tolist()) for part in parts for row in part]
    assert sorted(read) == sorted(tuple(row["input_ids"].tolist()) for row in small.rows())


@pytest.mark.parametrize("stateful", [True, False])
def test_a_stream_is_resumed_bit_for_bit(tmp_path, stateful):
    def data():
        rows = stream() if stateful else stream().shuffle(seed=5, buffer_size=16)
        return loader(SplitIterableDataset(rows), 4, stateful=stateful)

    checkpoints = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    options = {"enable_checkpointing": True, "max_epochs": 3, "max_steps": 16}
    full = small.train(
        tmp_path / "full", "ddp_fork", 2, data=data(), callbacks=[checkpoints], trainer_options=options,
        num_training_steps=16,
    )  # fmt: skip
    for step in (4, 8):
        rest = small.train(
            tmp_path / f"rest-{step}", "ddp_fork", 2, data=data(), ckpt_path=tmp_path / f"step={step}.ckpt",
            trainer_options={**options, "enable_checkpointing": False}, num_training_steps=16,
        )  # fmt: skip
        assert rest["losses"] == full["losses"][step:]


def test_collators_of_transformers_make_batches(tmp_path):
    from tokenizers import Tokenizer, models

    vocabulary = {"<pad>": 0, **{str(number): number for number in range(1, 64)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>")), pad_token="<pad>"
    )
    rows = [{"input_ids": list(range(3, 6 + index % 5))} for index in range(16)]
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    one = small.train(tmp_path / "one", data=DataLoader(rows, batch_size=8, collate_fn=collate))
    two = small.train(tmp_path / "two", "ddp_fork", 2, data=DataLoader(rows, batch_size=4, collate_fn=collate))
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-6)


def test_another_dataset_is_an_error_that_says_what_takes_it():
    with pytest.raises(MisuseError, match="a DataLoader takes a map-style Dataset as it is"):
        SplitIterableDataset(table())
