"""Which loaders a run takes."""

from __future__ import annotations

import re

import pytest

from dstrat.errors import MisuseError


@pytest.mark.parametrize("loaders", [[], {}, [[], {}]])
def test_an_empty_structure_has_no_loader(quiet_trainer, line, line_class, loaders):
    said = f"{re.escape(str(loaders))}, which has no loader: pass a DataLoader"
    with pytest.raises(MisuseError, match=f"^what was passed as the train loader is {said}"):
        quiet_trainer().fit(line, loaders)
    with pytest.raises(MisuseError, match=f"^what was passed as the val loader is {said}"):
        quiet_trainer().validate(line, loaders)

    class Own(line_class):
        def train_dataloader(self):
            return loaders

    with pytest.raises(MisuseError, match=rf"^what Own\.train_dataloader returned is {said}"):
        quiet_trainer().fit(Own())


@pytest.mark.parametrize("own", [True, False])
def test_validation_is_left_out_where_no_loader_is_passed_for_it(quiet_trainer, line_class, loader, own):
    class NotValidated(line_class):
        def on_validation_start(self):
            raise AssertionError("validated")

        if own:

            def val_dataloader(self):
                return []

            test_dataloader = val_dataloader

    quiet_trainer(max_epochs=1).fit(NotValidated(), loader(), None if own else [])
    if own:
        with pytest.raises(MisuseError, match=r"NotValidated\.test_dataloader returned is \[\], which has no loader"):
            quiet_trainer().test(NotValidated())
        with pytest.raises(MisuseError, match=r"NotValidated\.val_dataloader returned is \[\], which has no loader"):
            quiet_trainer().validate(NotValidated())


def test_a_data_module_of_another_library_is_told_what_it_is(quiet_trainer, make_line):
    class Foreign:
        def train_dataloader(self):
            return []

    for arguments in ({"datamodule": Foreign()}, {"train_dataloaders": Foreign()}):
        with pytest.raises(MisuseError, match=r"Foreign \(of .*\) is a data module of another library: derive it from"):
            quiet_trainer().fit(make_line(), **arguments)
