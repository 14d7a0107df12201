"""Tests of training on this machine's hardware against the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.catalog import get_catalog
from dstrat.testing.advice import fail
from dstrat.testing.reference import on_one_device
from dstrat.testing.skips import not_declared
from dstrat.testing.standard import standard
from dstrat.testing.strategy.base import StrategyTests

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dstrat.plugins.offer import Offer
    from dstrat.testing.place import Place

_CPU = "cpu"
_SAMPLES = 64
_MOST = 2  # processes
_TOLERANCE = 1e-3  # of losses in float32, whose products other hardware sums in another order


class Devices(StrategyTests):
    """Trainings on accelerators other than the processor."""

    @standard("device", "devices")
    def test_losses_on_other_hardware_are_those_of_the_processor(self) -> None:
        from dstrat.testing.fits import Fit, fit

        self.need_losses_of_one_device()
        names = [
            offer.component.alias
            for offer in get_catalog().offers("accelerator")
            if offer.component.alias != _CPU and self._may_run_on(offer)
        ]
        counts = self.shared_job(count_devices, 1, names=names)[0]
        sizes = {name: size for name, count in counts.items() if (size := self._largest_size(count))}
        if not sizes:
            those = ", ".join(names) or "the accelerators but the processor"
            not_declared(f"of {those} there are too few devices here")
        expected = on_one_device(samples=_SAMPLES).losses
        for name, world_size in sizes.items():
            fitted = self.job(fit, world_size, subject=self.subject, work=Fit(samples=_SAMPLES, accelerator=name))
            losses = [sum(losses) / len(losses) for losses in zip(*(rank.losses for rank in fitted), strict=True)]
            worst = max(abs(one - other) / one for one, other in zip(expected, losses, strict=True))
            if worst > _TOLERANCE:
                fail(
                    f"on {world_size} devices of {name} the losses differ from those of the processor by {worst:.1e}",
                    expected=f"a relative difference below {_TOLERANCE:g}.",
                )

    def _largest_size(self, devices: int) -> int:
        """Return the number of processes to try on so many devices; 0 where there is none."""
        most = min(devices, _MOST if self.component.starts_processes else 1)
        return max((size for size in self.world_sizes if size <= most), default=0)

    def _may_run_on(self, offer: Offer) -> bool:
        """Return whether an accelerator's record leaves it possible."""
        strategy, hardware = self.component, offer.component
        is_meant = not strategy.accelerators or bool({*offer.names, *hardware.groups} & {*strategy.accelerators})
        has_type = not strategy.device_types or hardware.device_type in (None, *strategy.device_types)
        can_communicate = not strategy.uses_torch_distributed or hardware.supports_torch_distributed is not False
        is_served = strategy.alias in hardware.strategies  # by another strategy
        return is_meant and has_type and can_communicate and not is_served


def count_devices(place: Place, names: Sequence[str]) -> dict[str, int]:  # noqa: ARG001 - every job's function takes it
    """Return how many devices of each accelerator are here, of those that are."""
    catalog = get_catalog()
    found = {}
    for name in names:
        offer = catalog.find("accelerator", name)
        accelerator = catalog.load(offer)(**offer.component.options)
        if accelerator.is_available():
            found[name] = accelerator.auto_device_count()
    return found
