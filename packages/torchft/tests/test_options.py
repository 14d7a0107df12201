"""Options of the strategy, and the division of the data."""

import socket
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("torchft", reason="needs torchft")

from packages.torchft.tests.lighthouse import free_port

from dstrat import Trainer, TrainModule, WeightAveraging
from dstrat.builtin.precision.true import TruePrecision
from dstrat.errors import ConflictError, LaunchError, MisuseError, RequestError
from dstrat.interfaces.memory import TrainingSize
from dstrat.interfaces.strategy import Parts
from dstrat_torchft import TorchFTDiLoCoStrategy, TorchFTStrategy
from dstrat_torchft.__main__ import main
from dstrat_torchft.internals import TrainingEnd


class Line(TrainModule):
    def __init__(self, optimizer=torch.optim.SGD):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=0.1)


def loader():
    return DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)


def trainer(**options):
    return Trainer(
        strategy=TorchFTStrategy(**options),
        accelerator="cpu",
        devices=1,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )


class Status(BaseHTTPRequestHandler):
    """The page of a lighthouse that has a mark."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"ended-ab12-20-1: seen 3.5s ago" if self.path == "/status" else b"")

    def log_message(self, *_):
        pass


def test_the_page_of_the_lighthouse_is_read_past_a_proxy(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with HTTPServer(("127.0.0.1", 0), Status) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            found = TrainingEnd.find_newest(f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            thread.join()
    assert found == TrainingEnd(digest="ab12", step=20, group=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lighthouse": "192.0.2.1:29510"}, "is no URL"),
        ({"replica_group": 2, "num_replica_groups": 2}, "count from 0"),
        ({"replica_group": -1}, "count from 0"),
        ({"num_replica_groups": 2, "min_replica_size": 3}, "can never be reached"),
        ({"min_replica_size": 0}, "can never be reached"),
        ({"quorum_timeout": timedelta()}, "is no time to wait"),
        ({"replica_timeout": timedelta(seconds=-1)}, "is no time to wait"),
    ],
)
def test_an_impossible_option_is_refused(options, message):
    with pytest.raises(RequestError, match=message):
        TorchFTStrategy(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0 is not a whole number from 1"),
        ({"every": 2.0}, "every=2.0 is not a whole number from 1"),
        ({"outer_lr": 0.0}, "outer_lr=0.0 is not above 0"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0 is not from 0 to below 1"),
    ],
)
def test_an_impossible_option_of_the_outer_optimizer_is_refused(options, message):
    with pytest.raises(RequestError, match=message):
        TorchFTDiLoCoStrategy(**options)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (TorchFTStrategy, "WeightAveraging has an average of weights that a joining group lacks: leave it out"),
        (TorchFTDiLoCoStrategy, "averages the weights of each replica group by itself"),
    ],
)
def test_averages_of_weights_that_differ_between_groups_are_refused(cls, message):
    strategy = cls(lighthouse="http://127.0.0.1:1", num_replica_groups=2)
    averaging = Trainer(strategy=strategy, accelerator="cpu", devices=1, max_steps=2, callbacks=[WeightAveraging()])
    with pytest.raises(ConflictError, match=message):
        averaging.fit(Line(), loader())


def size(world_size):
    return TrainingSize(
        module=torch.nn.BatchNorm1d(100),
        precision=TruePrecision("32-true"),
        device_type="cpu",
        world_size=world_size,
        ranks_per_machine=world_size,
        parameters=400_000,
        trainable_parameters=400_000,
        trainable_numel=100_000,
        largest_parameter=400_000,
        module_buffers=800,
        optimizer_state=800_000,
        optimizer_temporaries=0,
        timeline=((0, 0),),
    )


@pytest.mark.parametrize(("groups", "buffers", "sent"), [(1, 400_000, [400_000]), (2, 402_400, [400_000, 1600])])
def test_groups_declare_the_buffers_that_they_copy_and_send(groups, buffers, sent):
    strategy = TorchFTStrategy(num_replica_groups=groups)
    assert strategy.memory_layout(size(1)).buffers == buffers
    assert [each.bytes for each in strategy.communication_layout(size(1)).collectives] == sent


@pytest.mark.parametrize(
    ("lighthouse", "assumption"),
    [(None, "a lighthouse runs, whose URL is in TORCHFT_LIGHTHOUSE"), ("http://127.0.0.1:29510", "")],
)
def test_a_layout_without_a_lighthouse_says_that_it_needs_one(lighthouse, assumption, monkeypatch):
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    assert TorchFTStrategy(lighthouse=lighthouse).communication_layout(size(1)).assumption == assumption


@pytest.mark.parametrize(("world_size", "joined"), [(1, 0), (2, 400_000)])
def test_groups_that_train_apart_declare_outer_weights_momentum_and_buffers(world_size, joined):
    assert TorchFTDiLoCoStrategy().memory_layout(size(world_size)).buffers == joined + 2 * 400_000 + 800


@pytest.mark.parametrize("cls", [TorchFTStrategy, TorchFTDiLoCoStrategy])
def test_several_groups_take_their_steps_together(cls):
    assert [cls(num_replica_groups=groups).steps_with_other_jobs for groups in (1, 2)] == [False, True]


def test_a_variable_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv("REPLICA_GROUP_ID", "first")
    with pytest.raises(RequestError, match="REPLICA_GROUP_ID needs a whole number from 0, not 'first'"):
        TorchFTStrategy()


def test_groups_divide_the_training_data_only(monkeypatch):
    monkeypatch.setenv("REPLICA_GROUP_ID", "1")
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "3")
    strategy = TorchFTStrategy()

    class Cluster:
        world_size, global_rank = 2, 1

    strategy.receive(Parts(cluster_environment=Cluster()))
    assert strategy.training_sampler_kwargs == {"num_replicas": 6, "rank": 3}
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 1}


def test_a_missing_address_of_a_lighthouse_is_named(monkeypatch):
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(RequestError, match=r"needs the address of a lighthouse: .*torchft_lighthouse"):
        trainer().fit(Line(), loader())


def test_a_lighthouse_that_does_not_answer_is_named():
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(LaunchError, match=f"no lighthouse answers at {address}: start one"):
        trainer(lighthouse=address).fit(Line(), loader())


def test_lbfgs_is_refused_for_several_groups():
    with pytest.raises(MisuseError, match="LBFGS decides by the loss"):
        trainer(lighthouse="http://127.0.0.1:1", num_replica_groups=2).fit(Line(torch.optim.LBFGS), loader())


def test_an_evaluation_needs_no_lighthouse(monkeypatch):
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)

    class Evaluated(Line):
        def validation_step(self, batch, batch_idx):
            self.log("loss", self.training_step(batch, batch_idx))

    assert "loss" in trainer().validate(Evaluated(), loader())[0]


def test_an_address_that_other_machines_need_is_not_the_loopback():
    local, remote = (TorchFTStrategy(lighthouse=f"http://{host}:1").options for host in ("localhost", "192.0.2.1"))
    assert (local.address, local.bind_address) == ("127.0.0.1", "127.0.0.1")
    assert (remote.address, remote.bind_address) == (socket.gethostname(), None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-restarts", "-1"], "'-1' is not a whole number of 0 or more"),
        (["--groups", "0"], "'0' is not a whole number of 1 or more"),
        (["--groups", "two"], "'two' is not a whole number of 1 or more"),
    ],
)
def test_numbers_of_the_command_that_cannot_be_are_refused(options, message, capsys):
    with pytest.raises(SystemExit):
        main([*options, "train.py"])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("host", "reaches"), [("127.0.0.1", False), ("192.0.2.1", True)])
def test_groups_reach_other_machines_unless_the_lighthouse_is_here(host, reaches):
    assert TorchFTStrategy(lighthouse=f"http://{host}:29510").reaches_other_jobs is reaches
