"""Pipelines of compiled layers, and compiled models, which are refused."""

import warnings

import pytest
import torch
from packages.mesh.tests.pipeline_fits import Net, data
from tests.ranks import each, in_ranks
from tests.trainer_runs import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader

from dstrat.errors import MisuseError
from dstrat_mesh import MeshStrategy

BACKEND = "eager"


def compile_layers(module):
    for layer in module.net:
        layer.compile(backend=BACKEND)


def wrap_layers(module):
    for index, layer in enumerate(module.net):
        if isinstance(layer, nn.Linear):
            module.net[index] = torch.compile(layer, backend=BACKEND)


def compile_model(module):
    module.net.compile(backend=BACKEND)


def wrap_model(module):
    module.net = torch.compile(module.net, backend=BACKEND)


def compile_module(module):
    module.compile(backend=BACKEND)


def fitted(cluster, prepare=None):
    # Dynamo looks at the gradient of what an earlier layer has computed.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf Tensor")
    module = Net()
    if prepare is not None:
        prepare(module)
    strategy = "single_device" if cluster is None else MeshStrategy(pp=2)
    try:
        quiet_trainer(strategy, cluster).fit(
            module, DataLoader(data(), batch_size=8), DataLoader(data(16), batch_size=8)
        )
    except MisuseError as error:
        return str(error)
    return module.losses, module.validated[-1]


def test_compiled_layers_are_in_stages():
    losses, validated = fitted(None)
    cases = {function.__name__: {"prepare": function} for function in (compile_layers, wrap_layers)}
    for found in in_ranks(each, 2, function=fitted, cases=cases):
        for in_case in found.values():
            assert in_case == (pytest.approx(losses, rel=1e-6), pytest.approx(validated, rel=1e-6))


def test_a_model_that_is_compiled_as_a_whole_is_refused():
    cases = {function.__name__: {"prepare": function} for function in (compile_model, wrap_model, compile_module)}
    for found in in_ranks(each, 2, function=fitted, cases=cases):
        for message in found.values():
            assert message.startswith("net is compiled as a whole, and a pipeline divides its layers over ranks")
