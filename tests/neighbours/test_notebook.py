"""The tutorial about notebooks, in a real kernel: progress in one output, tables, and short tracebacks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="the session neighbours has it")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

pytestmark = [pytest.mark.neighbours, pytest.mark.slow]

PAGE = Path(__file__).parents[2] / "docs" / "tutorial-notebook.md"
FAILS = """
class Failing(Reader):
    def training_step(self, batch):
        return self.layers(batch[0][:, :3])  # of seven

"""
OF_TESTS = (
    f"{FAILS}Trainer(accelerator='cpu', devices=1).fit(Failing(), training)",
    "Trainer(accelerator='cpu', devices=2).fit(Failing(), training)",
    "results",
    "trainer.test(model, validation)",
)


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """Return the outputs of the page's cells, and after them those of the tests."""
    programs = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, (*programs, *OF_TESTS))))
    folder = tmp_path_factory.mktemp("notebook")
    nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(folder)}}
    ).execute()
    errors = [output for cell in notebook.cells[: len(programs)] for output in cell.outputs if "ename" in output]
    assert errors == []
    return [cell.outputs for cell in notebook.cells]


def html_of(outputs):
    return [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]


def printed(outputs, stream):
    return "".join(output["text"] for output in outputs if output.get("name") == stream)


def rows(table):
    """Return the cells of each row of an HTML table."""
    return [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)]


def of_error(outputs):
    (error,) = (output for output in outputs if output["output_type"] == "error")
    return error["ename"], re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error["traceback"]))


def test_a_fit_is_a_table_of_epochs_that_is_one_output(cells):
    _, _, fit, *_ = cells
    summary, progress = map(rows, html_of(fit))
    assert [row[0] for row in summary] == ["layer", "layers", "total"]
    assert [row[0] for row in progress] == ["", *(f"Epoch {number}/4" for number in range(1, 5))]
    assert progress[0][1:] == ["batches", "time", "speed", "loss", "val_accuracy", "val_loss"]
    assert {row[1] for row in progress[1:]} == {"128/128"}
    assert sum(cell.startswith("best ") for row in progress for cell in row) == 1
    assert printed(fit, "stderr") == ""  # a notebook shows it in red
    assert re.match(r"trained 4 epochs, 512 steps, in .*; checkpoint .*; logs ", printed(fit, "stdout"))


def test_values_and_results_are_tables(cells):
    _, plan, _, values, test, *_, again, last = cells
    assert rows(*html_of(plan))[0][0] == "strategy"
    assert {name for name, _ in rows(*html_of(values))} == {"name", "val_loss", "val_accuracy"}
    *_, results = html_of(test)
    assert [row[0] for row in rows(results)] == ["test", "val_accuracy", "val_loss"]
    assert html_of(again) == [results]  # in a cell of its own
    assert len([table for table in html_of(last) if rows(table)[0][0] == "test"]) == 1  # not a second time as the value


def test_forked_ranks_show_their_progress_in_the_notebook(cells):
    _, _, _, _, _, two, *_ = cells
    *_, progress = map(rows, html_of(two))
    assert [row[0] for row in progress[1:]] == ["Epoch 1/2", "Epoch 2/2"]
    assert {row[1] for row in progress[1:]} == {"64/64"}  # of each process
    assert "ddp_notebook torch.Size([64, 7])" in PAGE.read_text()
    assert printed(two, "stdout").splitlines()[-1] == "ddp_notebook torch.Size([64, 7])"


def test_a_traceback_has_the_cell_and_the_line_of_the_user(cells):
    *_, alone, _, _, _ = cells
    name, text = of_error(alone)
    assert name == "RuntimeError"
    assert "of seven" in text
    assert "trainer.py" not in text  # of fit and what is below it
    assert "site-packages/torch" in text  # which the user's line has called


def test_the_error_of_a_forked_rank_names_it_and_its_line(cells):
    *_, forked, _, _ = cells
    name, text = of_error(forked)
    assert name == "RankFailedError"
    assert re.search(r"rank \d of 2 failed: RuntimeError", text)
    assert "in training_step" in text
