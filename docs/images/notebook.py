"""Draw the pictures of the tutorial about notebooks: its cells in a kernel, while the third epoch runs.

Run ``python docs/images/notebook.py`` where dstrat, ipykernel, nbclient, nbconvert and chromium are installed.
"""

from __future__ import annotations

import copy
import re
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import nbclient
import nbconvert
import nbformat

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "tutorial-notebook.md"
SLOW_STEP = "import time\nReader.on_train_batch_end = lambda *_: time.sleep(0.015)\n"
SIZE = "900,710"


def main() -> None:
    """Execute the cells up to the training, and draw those of the plan and of the training."""
    data, plan, fit, *_ = re.findall(r"^```python\n(.*?)\n^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    cells = [nbformat.v4.new_code_cell(source) for source in (f"{data}\n{SLOW_STEP}", plan, fit)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": folder}})
        running = threading.Thread(target=client.execute)
        running.start()
        while "Epoch 2/4</td>" not in str(cells[-1].outputs):
            time.sleep(0.1)
        time.sleep(1.0)  # into the third epoch
        drawn = copy.deepcopy(notebook)
        running.join()
        drawn.cells = drawn.cells[1:]
        for theme, scheme in (("light", 1), ("dark", 0)):
            exporter = nbconvert.HTMLExporter(template_name="lab", theme=theme)
            page = Path(folder) / f"{theme}.html"
            page.write_text(exporter.from_notebook_node(drawn)[0])
            screenshot = FOLDER / f"notebook-{theme}.png"
            subprocess.run(
                [
                    "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                    f"--blink-settings=preferredColorScheme={scheme}", f"--window-size={SIZE}",
                    f"--screenshot={screenshot}", page.as_uri(),
                ],
                check=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
