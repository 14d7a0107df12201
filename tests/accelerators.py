"""Accelerator of the tests of trainings: the CPU, or on request another one, such as simulated GPUs."""

import os

from dstrat.plugins.catalog import get_catalog

ACCELERATOR = os.environ.get("DSTRAT_TEST_ACCELERATOR", "cpu")
# Beside a GPU no process can be forked that has run a backward pass, as tests have.
START_METHOD = "fork" if ACCELERATOR == "cpu" else "forkserver"


def make_accelerator():
    catalog = get_catalog()
    offer = catalog.find("accelerator", ACCELERATOR)
    return catalog.load(offer)(**offer.component.options)
