"""Ranks that read one batch, as of split layers, in loops of other libraries: data, seeds, metrics, schedulers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="this environment has no transformers: nox -s neighbours has")

sys.path.insert(0, str(Path(__file__).parent))

from test_trainer import LLAMA, start

pytestmark = [
    pytest.mark.xdist_group("hf_shared_batches"),
    pytest.mark.filterwarnings("ignore"),  # of the libraries
]

PROGRAM = """
import json
from transformers import TrainingArguments
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler
from dstrat.errors import ConflictError

class Numbers(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(8))

class Noise:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return {"input_ids": torch.randint(0, 8, (3,)), "labels": torch.tensor([1, 2, 3])}

def refused(call):
    try:
        call()
    except ConflictError as error:
        return str(error)

accelerator.prepare(model, optimizer)
loader = accelerator.prepare(DataLoader(Numbers(), batch_size=2))
values = next(iter(loader))
metrics = accelerator.gather_for_metrics(values)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
args = TrainingArguments("out", report_to="none", dataloader_num_workers=1, per_device_train_batch_size=2)
trainer = dstrat_transformers.DstratTrainer(model=LlamaForCausalLM(model.config), args=args, train_dataset=Noise())
shuffled = accelerator.prepare(DataLoader(range(8), batch_size=2, sampler=SubsetRandomSampler(range(8))))
seen = {
    "iterable": [batch.tolist() for batch in loader],
    "gathered": metrics.tolist(),
    "noise": [batch["input_ids"].tolist() for batch in trainer.get_train_dataloader()],
    "objects": refused(lambda: accelerator.gather_for_metrics(["text"])),
    "as_objects": refused(lambda: accelerator.gather_for_metrics(values, use_gather_object=True)),
    "scheduler": refused(lambda: accelerator.prepare(scheduler)),
    "dispatched": refused(
        lambda: dstrat_transformers.DstratAccelerator(
            dataloader_config=DataLoaderConfiguration(dispatch_batches=True)
        ).prepare(DataLoader(Numbers()))
    ),
}
torch.manual_seed(accelerator.process_index)  # as ranks have that have drawn other numbers
noisy = [accelerator.prepare(DataLoader(Noise(), batch_size=2, num_workers=number)) for number in (0, 1)]
seen["unseeded"] = [[batch["input_ids"].tolist() for batch in loader] for loader in noisy for _ in range(2)]
torch.manual_seed(accelerator.process_index)
seen["shuffled"] = [[batch.tolist() for batch in shuffled] for _ in range(2)]
of_ranks = [None, None]
torch.distributed.all_gather_object(of_ranks, seen)
if accelerator.is_main_process:
    print("SEEN", json.dumps(of_ranks))
"""


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    use = "dstrat_transformers.use('mesh(tp=2)', accelerator='cpu', devices=2)\n"
    use += "from accelerate.utils import DataLoaderConfiguration"
    ended = start(tmp_path_factory.mktemp("program"), use + LLAMA + PROGRAM)
    assert ended.returncode == 0, ended.stderr[-3000:]
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith("SEEN "))
    return json.loads(line.removeprefix("SEEN "))


def test_each_rank_reads_all_batches_of_an_iterable_dataset(of_ranks):
    assert [seen["iterable"] for seen in of_ranks] == [[[0, 1], [2, 3], [4, 5], [6, 7]]] * 2


def test_each_rank_has_the_order_that_the_first_one_draws(of_ranks):
    first, second = (seen["shuffled"] for seen in of_ranks)
    assert first == second
    assert first[0] != first[1]


def test_samples_are_drawn_alike_in_ranks_that_have_drawn_other_numbers(of_ranks):
    first, other = (seen["unseeded"] for seen in of_ranks)
    assert first == other
    assert len({str(epoch) for epoch in first}) == 4


def test_gathered_values_are_there_once(of_ranks):
    assert [seen["gathered"] for seen in of_ranks] == [[0, 1]] * 2


def test_workers_of_all_ranks_draw_the_same_numbers(of_ranks):
    first, second = (seen["noise"] for seen in of_ranks)
    assert first == second
    assert first[0] != first[1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("objects", "gathers only tensors"),
        ("as_objects", "gathers only tensors"),
        ("scheduler", "steps once for each process"),
        ("dispatched", "divide batches among all processes"),
    ],
)
def test_a_call_that_counts_a_batch_twice_is_an_error(of_ranks, call, message):
    for seen in of_ranks:
        assert message in (seen[call] or "no error")
