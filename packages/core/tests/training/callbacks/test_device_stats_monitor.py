from __future__ import annotations

import builtins
import logging
from functools import partial
from types import SimpleNamespace

import pytest
from tests.accelerators import ACCELERATOR

from dstrat import Logger
from dstrat.builtin.accelerators.cpu import CPUAccelerator
from dstrat.training.callbacks import device_stats_monitor
from dstrat.training.callbacks.device_stats_monitor import DeviceStatsMonitor, HostStats

OF_HOST = {"host/process_memory", "host/available_memory", "host/process_cpu_percent", "host/load_1min"}


class Kept(Logger):
    def __init__(self):
        self.written = {}

    def log_metrics(self, metrics, step):
        own = {name: value for name, value in metrics.items() if name.startswith(("device/", "host/"))}
        if own:
            self.written[step] = own


class Telling(CPUAccelerator):
    """A processor that reports something of itself."""

    def get_device_stats(self, device):
        return {"temperature": 40.0 if device.type == "cpu" else 0.0}


@pytest.fixture
def written(quiet_trainer, line, loader):
    def written_(monitor, **options):
        kept = Kept()
        quiet_trainer(callbacks=monitor, logger=kept, log_every_n_steps=5, **options).fit(line, loader())
        return kept.written

    return written_


def test_where_the_accelerator_reports_nothing_the_hosts_values_are_written_with_the_steps(written):
    found = written(DeviceStatsMonitor(), accelerator="cpu")
    assert list(found) == [5, 10]
    for values in found.values():
        assert set(values) == OF_HOST
        assert 50e6 < values["host/process_memory"] < 50e9
        assert values["host/available_memory"] > 1e6
        assert values["host/process_cpu_percent"] > 0


def test_a_process_that_keeps_one_core_busy_has_100_percent(monkeypatch):
    clocks = {"monotonic": iter((10.0, 12.0)), "process_time": iter((1.0, 3.0))}
    fake = SimpleNamespace(**{name: partial(next, values) for name, values in clocks.items()})
    monkeypatch.setattr(device_stats_monitor, "time", fake)
    assert HostStats().take()["process_cpu_percent"] == 100.0


def test_what_the_accelerator_reports_is_written_and_the_hosts_values_where_asked(written):
    assert written(DeviceStatsMonitor(), accelerator=Telling())[5] == {"device/temperature": 40.0}
    assert set(written(DeviceStatsMonitor(cpu_stats=True), accelerator=Telling())[5]) == OF_HOST | {
        "device/temperature"
    }
    assert written(DeviceStatsMonitor(cpu_stats=False), accelerator="cpu") == {}


def test_without_a_logger_it_says_that_it_writes_nothing(quiet_trainer, line, loader, caplog):
    with caplog.at_level(logging.WARNING):
        quiet_trainer(callbacks=DeviceStatsMonitor(), max_epochs=1).fit(line, loader())
    assert "DeviceStatsMonitor writes nothing, as the Trainer has no logger" in caplog.text


def test_without_proc_and_psutil_it_says_once_what_is_missing(tmp_path, monkeypatch, caplog):
    import_ = builtins.__import__

    def without_psutil(name, *args, **kwargs):
        if name == "psutil":
            raise ImportError(name)
        return import_(name, *args, **kwargs)

    monkeypatch.setattr(device_stats_monitor, "_PROC", tmp_path)
    monkeypatch.setattr(builtins, "__import__", without_psutil)
    device_stats_monitor._psutil.cache_clear()
    stats = HostStats()
    with caplog.at_level(logging.WARNING):
        assert "process_memory" not in stats.take()
        assert "process_cpu_percent" in stats.take()
    assert caplog.text.count("pip install psutil") == 1
    device_stats_monitor._psutil.cache_clear()


@pytest.mark.parametrize("accelerator", [pytest.param("gpu", marks=pytest.mark.cuda), *({ACCELERATOR} - {"cpu"})])
def test_a_gpu_reports_its_memory(written, accelerator):
    found = written(DeviceStatsMonitor(), accelerator=accelerator, devices=1)
    assert 0 < found[5]["device/memory_allocated"] <= found[5]["device/max_memory_allocated"]
