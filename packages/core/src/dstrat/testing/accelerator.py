"""The suite for accelerators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.errors import DeviceError
from dstrat.plugins.catalog import get_catalog
from dstrat.plugins.facts import accelerator_facts, contradiction
from dstrat.testing.plugin import check_light, check_record
from dstrat.testing.ranks.jobs import run_job
from dstrat.testing.suite import Suite, fail, not_declared, standard

if TYPE_CHECKING:
    from dstrat.interfaces.accelerator import Accelerator

_NONSENSE: tuple[Any, ...] = (0, -2, "many", [], [0, 0], [-1])  # -1 by itself means all devices


class AcceleratorSuite(Suite):
    """Standard tests of an accelerator; those of tier "device" are skipped where there is no such hardware."""

    kind = "accelerator"

    @standard("basic", "record")
    def test_its_plugin_is_light_to_import(self) -> None:
        check_light(self.offer)

    @standard("basic", "record")
    def test_its_record_is_complete_and_true(self) -> None:
        check_record(self.offer)

    @standard("basic", "hardware")
    def test_it_says_whether_it_is_available(self) -> None:
        answer = self._accelerator.is_available()
        if not isinstance(answer, bool):
            fail(f"is_available() returned {answer!r}: it must be True or False, also where there is no such hardware")

    @standard("basic", "hardware")
    def test_it_names_a_backend_for_its_tensors(self) -> None:
        name = getattr(self._accelerator, "process_group_backend", None)
        if not isinstance(name, str) or not name:
            fail(
                f"process_group_backend is {name!r}",
                fix='name the backend of its collectives, such as "gloo", or "none".',
            )

    @standard("basic", "record")
    def test_its_collectives_are_those_of_its_record(self) -> None:
        difference = contradiction(self.component, self._accelerator)
        if difference is not None:
            fail(f"the record of {self.alias} {difference}", fix="correct the one that is wrong.")

    @standard("device", "collectives")
    def test_its_backend_adds_the_numbers_of_two_processes(self) -> None:
        accelerator = self._available
        if not accelerator_facts(accelerator)["supports_torch_distributed"]:
            not_declared(f"{self.alias} declares no collectives of torch.distributed")
        try:
            accelerator.parse_devices(2)
        except DeviceError:
            not_declared(f"{self.alias} has fewer than two devices here")
        from dstrat.testing.ranks.communication import sum_over_ranks  # here, as it imports torch

        totals = run_job(sum_over_ranks, 2, component=self.offer.component, options=dict(self.options))
        if totals != [3.0, 3.0]:
            fail(f"the sum of 1 and 2 over two processes is {totals} by {accelerator.process_group_backend}")

    @standard("device", "devices")
    def test_it_finds_the_devices_that_a_user_means(self) -> None:
        accelerator = self._available
        expected = accelerator.parse_devices(1)
        for devices in ("1", [expected[0]]):
            if accelerator.parse_devices(devices) != expected:
                fail(f"devices={devices!r} means {accelerator.parse_devices(devices)}, and devices=1 means {expected}")
        if accelerator.auto_device_count() < 1:
            fail('auto_device_count() is 0 on available hardware: it is what devices="auto" stands for')

    @standard("device", "devices")
    def test_it_refuses_devices_that_make_no_sense(self) -> None:
        accelerator = self._available
        for devices in _NONSENSE:
            try:
                parsed = accelerator.parse_devices(devices)
            except DeviceError:
                continue
            fail(
                f"parse_devices accepts {devices!r}, as {parsed}", fix="raise DeviceError, which says what is possible."
            )

    @standard("device", "devices")
    def test_it_gives_a_device_of_torch_for_each_index(self) -> None:
        import torch

        accelerator = self._available
        devices = accelerator.get_parallel_devices(accelerator.parse_devices(1))
        if len(devices) != 1 or not isinstance(devices[0], torch.device):
            fail(f"get_parallel_devices gave {devices!r} for one index: it must give one torch.device for each")
        if self.component.device_type not in (None, devices[0].type):
            fail(
                f"the record of {self.alias} says device_type={self.component.device_type!r}, and its devices are of "
                f"the type {devices[0].type!r}",
                fix=f'write device_type="{devices[0].type}" in the record.',
            )
        total = float(torch.ones(3, device=devices[0]).sum())
        if total != 3.0:
            fail(f"the sum of three ones on {devices[0]} is {total}")

    @standard("device", "life cycle")
    def test_it_may_be_set_up_and_ended_twice(self) -> None:
        accelerator = self._available
        for _ in range(2):  # a process may train twice
            accelerator.setup(self._device)
            accelerator.teardown()

    @standard("device", "random numbers")
    def test_its_random_numbers_come_back(self) -> None:
        import torch

        accelerator, device = self._available, self._device
        accelerator.setup(device)
        state = accelerator.get_random_state(device)
        if state is None:
            not_declared(f"{self.alias} has no random numbers of its own")
        drawn = torch.rand(4, device=device)
        accelerator.set_random_state(device, state)
        if not torch.equal(torch.rand(4, device=device), drawn):
            fail(
                f"{self.alias} draws other random numbers after set_random_state(get_random_state())",
                expected="the same, or a resumed training is another one.",
            )

    @standard("device", "hardware")
    def test_its_statistics_are_numbers(self) -> None:
        wrong = {
            name: value
            for name, value in self._available.get_device_stats(self._device).items()
            if not isinstance(value, int | float)
        }
        if wrong:
            fail(f"get_device_stats returned {wrong}: each value must be a number, for loggers")

    @property
    def _accelerator(self) -> Accelerator:
        accelerator: Accelerator = get_catalog().load(self.offer)(**{**self.component.options, **self.options})
        return accelerator

    @property
    def _available(self) -> Accelerator:
        accelerator = self._accelerator
        if not accelerator.is_available():
            not_declared(f"no {self.alias} is available here")
        return accelerator

    @property
    def _device(self) -> Any:
        return self._available.get_parallel_devices(self._available.parse_devices(1))[0]
