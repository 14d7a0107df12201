"""What an own loop prints, logs, reduces and gathers."""

import csv
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from tests.accelerators import ACCELERATOR, make_accelerator
from tests.printed import without_gloo
from torch import nn

import dstrat
from dstrat import CSVLogger, GradientSyncStrategy, OwnLoop
from dstrat.errors import MisuseError


class Averaging(GradientSyncStrategy):
    """Gradients averaged by hand."""

    start_method = "fork"

    def synchronize_gradients(self, gradients):
        for gradient in gradients:
            gradient.copy_(self.reduce(gradient))


def launch(function, *args, devices=2, loggers=None, **options):
    strategy = Averaging() if devices > 1 else "single_device"
    built = dstrat.build(strategy=strategy, accelerator=ACCELERATOR, devices=devices, **options)
    return OwnLoop(built, loggers).launch(function, *args)


def test_collections_of_tensors_and_numbers_are_reduced_and_gathered():
    def values(loop):
        rank = float(loop.global_rank)
        data = {"loss": torch.tensor([rank, 2.0]), "counts": [1 + loop.global_rank, (rank,)], "name": "x"}
        reduced = loop.all_reduce(data, reduce_op="sum")
        gathered = loop.all_gather(data)
        first = loop.broadcast({"rank": loop.global_rank}, src=1)
        return (
            [reduced["loss"].tolist(), reduced["counts"][0].item(), reduced["counts"][1][0].item(), reduced["name"]],
            [gathered["loss"].tolist(), gathered["counts"][0].tolist()],
            [first, loop.world_size, loop.is_global_zero, loop.local_rank, loop.node_rank, loop.device.type],
        )

    reduced, gathered, places = launch(values)
    assert reduced == [[1.0, 4.0], 3, 1.0, "x"]
    assert gathered == [[[0.0, 2.0], [1.0, 2.0]], [1, 2]]
    assert places == [{"rank": 1}, 2, True, 0, 0, make_accelerator().get_parallel_devices([0])[0].type]


class Pair(NamedTuple):
    loss: float
    count: int


@dataclass
class Report:
    total: int


def test_numbers_in_named_tuples_and_dataclasses_are_reduced():
    def values(loop):
        rank = loop.global_rank
        pair, report = loop.all_reduce([Pair(float(rank), 1), Report(rank)], reduce_op="sum")
        return type(pair).__name__, float(pair.loss), int(pair.count), int(report.total)

    assert launch(values) == ("Pair", 1.0, 2, 1)


def test_on_one_device_a_gathered_number_has_one_value():
    assert launch(lambda loop: loop.all_gather(3).tolist(), devices=1) == [3]


def test_rank_0_is_first(tmp_path):
    path = tmp_path / "order"

    def write(loop):
        with loop.rank_zero_first(), path.open("a") as file:
            file.write(str(loop.global_rank))
        loop.barrier()
        return path.read_text()

    assert launch(write) == "01"


def test_the_first_process_prints_once(capfd):
    launch(lambda loop: loop.print("hello", loop.global_rank, flush=True))
    assert without_gloo(capfd.readouterr().out) == "hello 0\n"


def test_values_are_logged_once_by_step(tmp_path):
    def train(loop):
        net = nn.Linear(2, 1)
        loop.setup(net, lambda net: torch.optim.SGD(net.parameters(), lr=0.1))
        for index in range(2):
            loss = loop.compute(net, torch.ones(4, 2, device=loop.device)).mean()
            loop.backward(loss)
            loop.step()
            loop.log("index", index)
        loop.log_dict({"index": torch.tensor(7), "other": 0.5}, step=10)

    launch(train, loggers=CSVLogger(tmp_path))
    [file] = tmp_path.glob("**/metrics.csv")
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["step"], float(row["index"])) for row in rows] == [("1", 0.0), ("2", 1.0), ("10", 7.0)]


def test_autocast_has_the_precision_that_was_asked_for():
    def multiply(loop):
        loop.setup(nn.Linear(2, 2))
        with loop.autocast():
            return (torch.ones(2, 2, device=loop.device) @ torch.ones(2, 2, device=loop.device)).dtype

    assert launch(multiply, devices=1, precision="bf16-mixed") is torch.bfloat16


def test_batches_are_brought_to_the_device_and_its_precision():
    def move(loop):
        return loop.to_device({"x": torch.ones(2)})["x"].dtype

    assert launch(move, devices=1, precision="64-true") is torch.float64


def test_logging_without_a_logger_or_of_what_is_no_number_is_refused(tmp_path):
    with pytest.raises(MisuseError, match=r"log was called without a logger: OwnLoop\(strategy, loggers="):
        launch(lambda loop: loop.log("x", 1), devices=1)
    with pytest.raises(MisuseError, match=r"log\('x', \.\.\.\) got 'text': pass a number"):
        launch(lambda loop: loop.log("x", "text"), devices=1, loggers=[CSVLogger(tmp_path)])
    with pytest.raises(MisuseError, match="loggers has 'csv', not a Logger"):
        launch(lambda loop: None, devices=1, loggers="csv")
    with pytest.raises(MisuseError, match=r"it is a class: pass an instance, CSVLogger\("):
        launch(lambda loop: None, devices=1, loggers=CSVLogger)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ("net", "setup got 'net': pass a torch.nn.Module, or a list or dict of them"),
        ({"training": nn.Linear(1, 1)}, "'training': .*Linear.* is not a torch.nn.Module under a name of its own"),
        ([nn.Linear(1, 1), "net"], "'1': 'net' is not a torch.nn.Module"),
    ],
)
def test_what_are_no_modules_is_refused(modules, message):
    with pytest.raises(MisuseError, match=message):
        launch(lambda loop: loop.setup(modules), devices=1)
