"""The table that a validation or test leaves."""

from __future__ import annotations

import pytest

from dstrat.training.evaluation_results import EvaluationResults


@pytest.fixture
def several(line_class):
    class Several(line_class):
        def test_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("loader", dataloader_idx + 0.25)
            if dataloader_idx == 1:
                self.log("second", 1234567.0)

    return Several()


def test_what_a_test_came_to_is_shown_as_lines_once_for_the_job(quiet_trainer, several, loader, averaging, capfd):
    quiet_trainer(strategy=averaging(), devices=2).test(several, [loader(), loader()])
    assert capfd.readouterr().err.splitlines() == [
        "test    loader 0  loader 1",
        "--------------------------",
        "loader      0.25      1.25",
        "second             1234567",
    ]


def test_nothing_is_shown_where_it_was_not_asked_for(quiet_trainer, line, loader, capfd):
    quiet_trainer().validate(line, loader(), verbose=False)
    quiet_trainer().test(line, loader(), verbose=False)
    quiet_trainer(barebones=True, logger=None).test(line, loader())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("loaders", "tables"), [(1, 1), (3, 1), (9, 3)])
def test_a_terminal_of_80_columns_has_every_value(terminal, monkeypatch, loaders, tables):
    monkeypatch.setenv("COLUMNS", "80")
    name = "a_name_that_is_longer_than_half_of_the_terminal_is_wide"
    results = [{f"{name}/dataloader_idx_{index}": 0.1 * index, "tiny": 1.23456e-12} for index in range(loaders)]
    with terminal() as shown:
        EvaluationResults("validate", results).show()
    text = "\n".join(shown.lines)
    assert max(map(len, shown.lines)) <= 80
    assert text.count("1.23456e-12") == loaders
    assert text.count("validate") == tables
