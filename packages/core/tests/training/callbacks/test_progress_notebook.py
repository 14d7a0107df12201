"""The table and the bars that a notebook shows; tests/neighbours/test_notebook.py has a real kernel."""

from __future__ import annotations

import re

from dstrat.training.callbacks.progress import Progress
from dstrat.training.callbacks.progress_notebook import FinishedLoop, history_table, running_bars
from dstrat.training.evaluation_results import MetricValues
from dstrat.training.notebook import has_notebook


def finished(number, **values):
    return FinishedLoop.of(Progress(f"Epoch {number}", 8, 8), values)


def rows(table):
    return [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)]


def test_only_the_last_best_value_of_a_name_is_marked():
    loops = [finished(1, loss="3 (best)"), finished(2, loss="2 (best)"), finished(3, loss=2.5)]
    assert [row[-1] for row in rows(history_table(loops, loops))] == ["loss", "3", "best 2", "2.5"]


def test_a_value_that_some_loops_lack_has_a_column():
    loops = [finished(1, loss=1.0), finished(2, loss=0.5, val_loss=2.0)]
    head, first, second = rows(history_table(loops, loops))
    assert head == ["", "batches", "time", "speed", "loss", "val_loss"]
    assert (first[-2:], second[-2:]) == (["1", ""], ["0.5", "2"])
    assert rows(history_table(loops[1:], loops)) == [head, second]


def test_a_bar_of_unknown_length_has_no_value():
    known, unknown = running_bars([Progress("Epoch 1", 8, 2), Progress("Validation", None)], {}).split("<progress")[1:]
    assert 'value="2" max="8"' in known
    assert "value=" not in unknown.split(">")[0]


def test_names_and_titles_are_escaped():
    loop = FinishedLoop.of(Progress("<i>", 8, 8), {"<b>": 1.0})
    shown = history_table([loop], [loop]) + running_bars([Progress("<i>", 8)], {"<b>": 1.0})
    assert "<i>" not in shown
    assert "<b>" not in shown
    assert shown.count("&lt;b&gt;") == 2


def test_metrics_are_a_dict_that_a_notebook_shows_as_a_table(quiet_trainer, line_class, loader):
    class Logs(line_class):
        def training_step(self, batch, batch_idx):
            self.log("half", 0.5)
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Logs(), loader())
    assert not has_notebook()
    assert ["half", "0.5"] in rows(trainer.callback_metrics._repr_html_())
    assert trainer.callback_metrics["half"] == 0.5
    assert rows(MetricValues(many=1 / 3)._repr_html_())[1] == ["many", "0.333333"]
