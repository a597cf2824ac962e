"""A real S3 API on loopback, with its own errors, for tests of addresses."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def served() -> Iterator[Any]:
    """The file system of an S3 that this process and those that it starts are told of by their environment."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    told = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    import s3fs

    try:
        yield s3fs.S3FileSystem(skip_instance_cache=True)
    finally:
        server.stop()
        s3fs.S3FileSystem.clear_instance_cache()  # another one has another port
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
