from __future__ import annotations

import csv
import logging
import time

import pytest
import torch

from dstrat import CSVLogger, Logger
from dstrat.errors import RequestError
from dstrat.training.callbacks.throughput_monitor import Throughput, ThroughputMonitor, peak_flops


class Kept(Logger):
    """Keeps what it is given that is about throughput."""

    def __init__(self):
        self.written = {}

    def log_metrics(self, metrics, step):
        own = {name.removeprefix("throughput/"): value for name, value in metrics.items() if "throughput" in name}
        if own:
            self.written[step] = own


@pytest.fixture
def kept():
    return Kept()


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

    clock = Clock()
    monkeypatch.setattr("dstrat.training.callbacks.throughput_monitor.monotonic", lambda: clock.now)
    return clock


@pytest.fixture
def clocked(clock, line_class):
    """A module each of whose training batches takes 0.5 s, and each of validation 100 s."""

    class Clocked(line_class):
        def training_step(self, batch, batch_idx):
            clock.now += 0.5
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            clock.now += 100.0

    return Clocked()


def test_rates_are_measured_over_the_last_batches(clock):
    throughput = Throughput(window_size=2)
    assert throughput.rates() is None
    for seconds, samples in ((0, 99), (1, 10), (1, 20), (3, 40)):
        clock.now += seconds
        throughput.add(samples=samples, tokens=2 * samples)
    rates = throughput.rates()
    assert (rates.batches, rates.samples, rates.tokens) == (0.5, 15.0, 30.0)
    clock.now += 1000
    throughput.skip(1000)
    clock.now += 1
    throughput.add(samples=20)
    assert throughput.rates().samples == 15.0


def test_window_covers_as_many_batches_where_several_end_at_once(clock):
    throughput = Throughput(window_size=4)
    for samples in (99, 40, 40, 60):
        clock.now += 2
        throughput.add(batches=4, samples=samples)
    assert (throughput.rates().batches, throughput.rates().samples) == (2.0, 30.0)


def test_batches_and_samples_per_second_are_written_with_the_steps_and_leave_validation_out(
    quiet_trainer, clocked, loader, kept
):
    trainer = quiet_trainer(callbacks=ThroughputMonitor(), logger=kept, log_every_n_steps=4, val_check_interval=3)
    trainer.fit(clocked, loader(), loader(16))
    assert kept.written == {
        step: {
            "batches_per_sec": 2.0, "samples_per_sec": 16.0,
            "device/batches_per_sec": 2.0, "device/samples_per_sec": 16.0,
        }
        for step in (4, 8, 12)
    }  # fmt: skip


def test_samples_and_tokens_are_counted_as_the_user_says(quiet_trainer, clocked, loader, kept):
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: 2, length_fn=lambda batch: batch[0].numel())
    quiet_trainer(callbacks=monitor, logger=kept, log_every_n_steps=6, max_epochs=1).fit(clocked, loader())
    assert kept.written[6]["samples_per_sec"] == 4.0
    assert kept.written[6]["tokens_per_sec"] == kept.written[6]["device/tokens_per_sec"] == 128.0


def test_the_operations_of_the_first_batch_over_the_peak_are_the_utilization(quiet_trainer, clocked, loader, kept):
    monitor = ThroughputMonitor(available_flops=1024.0)
    quiet_trainer(callbacks=monitor, logger=kept, log_every_n_steps=3, max_epochs=1).fit(clocked, loader())
    per_sample = 2 * 8 + 2 * 8  # forward, and the weight's gradient; the input has none
    assert kept.written[3]["device/flops_per_sec"] == pytest.approx(16 * per_sample)
    assert kept.written[3]["device/mfu"] == pytest.approx(16 * per_sample / 1024)


def test_operations_that_the_user_knows_are_not_counted(quiet_trainer, clocked, loader, kept):
    quiet_trainer(
        callbacks=ThroughputMonitor(flops_per_sample=100.0), logger=kept, log_every_n_steps=3, max_epochs=1
    ).fit(clocked, loader())
    assert kept.written[3]["device/flops_per_sec"] == 1600.0
    assert "device/mfu" not in kept.written[3]


def test_a_batch_that_fails_leaves_no_counter_behind(quiet_trainer, line_class, loader, kept):
    class Failing(line_class):
        def training_step(self, batch, batch_idx):
            raise ValueError("broken")

    monitor = ThroughputMonitor(available_flops=1.0)
    with pytest.raises(ValueError, match="broken"):
        quiet_trainer(callbacks=monitor, logger=kept).fit(Failing(), loader())
    assert torch._C._len_torch_dispatch_stack() == 0


def test_the_whole_job_is_all_ranks_together(quiet_trainer, line_class, loader, averaging, tmp_path):
    class Sized(ThroughputMonitor):
        def setup(self, trainer, module, stage):
            self._batch_size_fn = lambda batch: 1 if trainer.global_rank == 0 else 7

    class Slow(line_class):
        def training_step(self, batch, batch_idx):
            time.sleep(0.02 if self.trainer.global_rank == 0 else 0.01)
            return super().training_step(batch, batch_idx)

    logger = CSVLogger(tmp_path, name="", version="run")
    quiet_trainer(callbacks=Sized(), logger=logger, log_every_n_steps=6, devices=2, strategy=averaging()).fit(
        Slow(), loader(4)
    )
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["throughput/samples_per_sec"]]
    assert [row["step"] for row in rows] == ["6", "12"]
    for row in rows:
        device, job = (float(row[f"throughput/{of}samples_per_sec"]) for of in ("device/", ""))
        assert job == pytest.approx(2 * device)
        assert 0 < device < 200  # as the steps of rank 0 take 20 ms at least


def test_without_a_logger_it_says_that_it_writes_nothing(quiet_trainer, line, loader, caplog):
    with caplog.at_level(logging.WARNING):
        quiet_trainer(callbacks=ThroughputMonitor(), max_epochs=1).fit(line, loader())
    assert "ThroughputMonitor writes nothing, as the Trainer has no logger" in caplog.text


@pytest.mark.parametrize("wrong", [{"window_size": 0}, {"available_flops": -1.0}, {"flops_per_sample": 0}])
def test_numbers_out_of_range_are_an_error(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(RequestError, match=rf"ThroughputMonitor\({name}={value}\) must be more than 0"):
        ThroughputMonitor(**wrong)


def test_a_batch_without_tensors_is_an_error_that_says_what_to_pass(quiet_trainer, line_class, kept):
    class Net(line_class):
        def training_step(self, batch, batch_idx):
            return self.layer.weight.sum()

    loader = torch.utils.data.DataLoader(["text", "words"], batch_size=None)
    with pytest.raises(RequestError, match="no tensor in a batch of type str to count samples by: pass batch_size_fn"):
        quiet_trainer(callbacks=ThroughputMonitor(), logger=kept).fit(Net(), loader)


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "float16", 756),
        ("NVIDIA H200", "float32", 66.9),
        ("NVIDIA H200 NVL", "bfloat16", None),
        ("NVIDIA GH200 480GB", "bfloat16", None),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A10", "float16", 125),
        ("NVIDIA A10G", "float16", None),
        ("NVIDIA L40S", "float32", 91.6),
        ("NVIDIA L4", "bfloat16", 121),
        ("Tesla V100-SXM2-16GB", "float16", 125),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("NVIDIA GeForce RTX 3090", "bfloat16", 71),
        ("NVIDIA GeForce RTX 3090 Ti", "bfloat16", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", None),
        ("NVIDIA A100-SXM4-80GB", "float64", None),
        ("Some other card", "float16", None),
    ],
)
def test_peaks_are_looked_up_by_the_devices_name_and_the_dtype(name, dtype, tera):
    found = peak_flops(name, getattr(torch, dtype), allows_tf32=False)
    assert found == (None if tera is None else pytest.approx(tera * 1e12))


def test_float32_may_be_computed_in_tensorfloat():
    assert peak_flops("NVIDIA H100 80GB HBM3", torch.float32, allows_tf32=True) == pytest.approx(494.7e12)
    assert peak_flops("Tesla T4", torch.float32, allows_tf32=True) == pytest.approx(8.1e12)


@pytest.mark.cuda
def test_on_a_gpu_in_the_table_the_utilization_is_a_fraction(quiet_trainer, loader, kept, line_class):
    device_name = torch.cuda.get_device_name()
    if peak_flops(device_name, torch.bfloat16, allows_tf32=False) is None:
        pytest.skip(f"the peak of {device_name} is not known")
    quiet_trainer(
        accelerator="gpu", devices=1, precision="bf16-mixed", callbacks=ThroughputMonitor(), logger=kept,
        log_every_n_steps=6,
    ).fit(line_class(), loader())  # fmt: skip
    assert 0 < kept.written[12]["device/mfu"] < 1


def test_where_every_batch_is_left_out_nothing_goes_on_counting(quiet_trainer, line_class, loader, kept):
    class Idle(line_class):
        def on_train_batch_start(self, batch, batch_idx):
            return -1

    quiet_trainer(callbacks=ThroughputMonitor(available_flops=1e12), logger=kept).fit(Idle(), loader())
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
