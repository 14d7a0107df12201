"""A lighthouse as a process of its own, as users start it."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def running_lighthouse(port=None, *, min_replicas=1, heartbeat_timeout=2.0, join_timeout=1.0):
    """Run a lighthouse, and yield its process and address."""
    port = port or free_port()
    program = Path(sys.executable).with_name("torchft_lighthouse")
    options = {
        "--bind": f"127.0.0.1:{port}",
        "--min_replicas": min_replicas,
        "--heartbeat_timeout_ms": round(1000 * heartbeat_timeout),
        "--join_timeout_ms": round(1000 * join_timeout),
        "--quorum_tick_ms": 20,
    }
    arguments = [str(text) for option in options.items() for text in option]
    environ = {**os.environ, "RUST_LOG": "error"}
    with subprocess.Popen([program, *arguments], env=environ, stdout=subprocess.DEVNULL) as process:
        try:
            _wait_until_it_listens(port)
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def _wait_until_it_listens(port):
    deadline = time.monotonic() + 300  # it imports torch
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    raise TimeoutError(f"no lighthouse on port {port}")
