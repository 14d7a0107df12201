"""What the tests of the portable format share."""

from __future__ import annotations

import contextlib
import logging
import os
import uuid

import pytest
import torch._dynamo  # noqa: F401 - distributed tensors need it, and each forked rank would import it

from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.errors import CheckpointError


@pytest.fixture
def io():
    return PortableCheckpointIO()


@pytest.fixture
def refusal():
    """Call a function that must refuse, and return what it says."""

    def call(function, *args, **kwargs):
        with pytest.raises(CheckpointError) as caught:
            function(*args, **kwargs)
        return str(caught.value)

    return call


@contextlib.contextmanager
def _s3_server():
    """Yield the URL of an empty bucket; processes that are started in the block find the server too."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    _, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("checkpoints")
        yield "s3://checkpoints"
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        server.stop()


@pytest.fixture(scope="session")
def s3():
    """The URL of a bucket of a server on this machine."""
    pytest.importorskip("moto", reason="moto is not installed")
    with _s3_server() as url:
        yield url


@pytest.fixture
def new_folder():
    """Return a folder in a store that nobody else has."""
    return lambda store: f"{store}/{uuid.uuid4().hex}"
