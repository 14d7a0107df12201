"""Which steps and hooks of an evaluation are told the index of the loader."""

from __future__ import annotations

import pytest

from dstrat import Callback, LambdaCallback


@pytest.mark.parametrize("profiler", [None, "simple"])
@pytest.mark.parametrize("loaders", [1, 2])
@pytest.mark.parametrize(("run", "stage"), [("validate", "validation"), ("test", "test"), ("predict", "predict")])
def test_who_needs_the_index_gets_it_and_who_does_not_gets_it_of_several(
    quiet_trainer, line_class, loader, run, stage, loaders, profiler
):
    seen = []

    def required(self, batch, batch_idx, dataloader_idx):
        seen.append(("step", dataloader_idx))

    def with_default(self, batch, batch_idx, dataloader_idx=7):
        seen.append(("module", dataloader_idx))

    def of_callback(self, trainer, module, outputs, batch, batch_idx, dataloader_idx):
        seen.append(("callback", dataloader_idx))

    def everything(trainer, module, batch, batch_idx, *rest):
        seen.append(("lambda", *rest))

    module = type("Told", (line_class,), {f"{stage}_step": required, f"on_{stage}_batch_start": with_default})()
    callbacks = [
        type("Told", (Callback,), {f"on_{stage}_batch_end": of_callback})(),
        LambdaCallback(**{f"on_{stage}_batch_start": everything}),
    ]
    given = [loader(48)] * loaders
    getattr(quiet_trainer(callbacks=callbacks, profiler=profiler), run)(module, given)
    rest, default = ([], 7) if loaders == 1 else ([0], 0)
    first = [("lambda", *rest), ("module", default), ("step", 0), ("callback", 0)]
    others = [(name, 1) for name, *_ in first] if loaders == 2 else []
    assert seen == first + others
