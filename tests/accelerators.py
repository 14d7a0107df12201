"""Accelerator of the tests of trainings: the CPU, or on request another one, such as simulated GPUs."""

import os

from dstrat.plugins.catalog import get_catalog

ACCELERATOR = os.environ.get("DSTRAT_TEST_ACCELERATOR", "cpu")


def make_accelerator():
    catalog = get_catalog()
    offer = catalog.find("accelerator", ACCELERATOR)
    return catalog.load(offer)(**offer.component.options)
