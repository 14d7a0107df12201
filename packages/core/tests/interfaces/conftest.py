"""What the tests of interfaces share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def hardware(request):
    """Skip tests of hardware that is not there, and say so."""
    if request.node.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no CUDA device")
