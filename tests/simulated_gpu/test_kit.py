"""The conformance kit catches strategies that are wrong where memory of the device is not the host's."""

import pytest

from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat.interfaces.memory import MemoryLayout
from dstrat.plugins.catalog import get_catalog
from dstrat.plugins.component import Component
from dstrat.testing import StrategySuite


class StaysOnHost(SingleDeviceStrategy):
    """Leaves the module on the host."""

    def model_to_device(self):
        pass


class Offloads(StaysOnHost):
    """The same, as an option that it declares."""

    def memory_layout(self, training):
        return MemoryLayout(parameters=0, gradients=0, optimizer_state=0, host=training.parameters)


class OffloadsHalf(StaysOnHost):
    """Leaves more on the host than it declares."""

    def memory_layout(self, training):
        half = training.parameters // 2
        return MemoryLayout(parameters=half, gradients=0, optimizer_state=0, host=half)


@pytest.fixture
def message(monkeypatch):
    """Return what the kit says of where a strategy has its module; "" if that is right."""
    monkeypatch.setattr(get_catalog(), "_registered", get_catalog()._registered)

    def message_(cls):
        target = f"{cls.__module__}:{cls.__qualname__}"
        component = Component(kind="strategy", alias=cls.__name__.lower(), target=target, summary="of a test")
        get_catalog().register(component, override=True)
        suite = type("TestIt", (StrategySuite,), {"alias": cls.__name__.lower(), "accelerator": "simulated_gpu"})
        try:
            suite().test_setup_puts_the_module_on_the_device_and_keeps_it_the_users()
        except pytest.fail.Exception as failure:
            return " ".join(str(failure).split())
        return ""

    return message_


@pytest.mark.parametrize(("cls", "declared"), [(StaysOnHost, 0), (OffloadsHalf, 326)])
def test_parameters_on_the_host_that_are_not_declared_fail(message, cls, declared):
    said = message(cls)
    assert "after setup 652 bytes of parameters are on the host, root_device is simgpu:0" in said
    assert f"memory_layout declares {declared} bytes on the host" in said


def test_parameters_that_are_declared_to_be_on_the_host_pass(message):
    assert message(Offloads) == ""
