"""The key-value server at which Horovod's ranks find each other when they use Gloo.

`horovodrun` has such a server too, on every network interface; this one listens on one address: `python -I -S
horovod_rendezvous.py HOST PORT`. It needs the standard library alone.

The protocol is that of Horovod 0.28.1, horovod/runner/http/http_server.py: PUT and GET of `/scope/key`, with 404
for what is not there yet (the client asks again), and DELETE by each rank that leaves.
"""

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LARGEST_VALUE_NBYTES = 1 << 20  # what Gloo stores are addresses


class KeyValueHandler(BaseHTTPRequestHandler):
    """GET, PUT and DELETE of values by path."""

    values: dict[str, bytes] = {}  # noqa: RUF012 (one store for all requests is the point)
    lock = threading.Lock()

    def do_GET(self) -> None:
        """Answer with the value, or 404 where there is none yet."""
        with self.lock:
            value = self.values.get(self.path)
        if value is None:
            self._answer(404)
        else:
            self._answer(200, value)

    def do_PUT(self) -> None:
        """Store the body."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > LARGEST_VALUE_NBYTES:
            self._answer(400)
            return
        value = self.rfile.read(int(length))
        with self.lock:
            self.values[self.path] = value
        self._answer(200)

    def do_DELETE(self) -> None:
        """A rank leaves; what it stored may be asked for by slower ones, so it stays until the run's end."""
        self._answer(200)

    def _answer(self, code: int, body: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the name is the base class's)
        """Say nothing: the learner's log is for the learner's workers."""


class RendezvousServer(ThreadingHTTPServer):
    """The server, for many ranks that all come at once."""

    request_queue_size = 1024  # the default of 5 makes the kernel turn ranks away

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing about a rank that died while it asked: the launcher reports it better."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


if __name__ == "__main__":
    host, port = sys.argv[1:]
    RendezvousServer((host, int(port)), KeyValueHandler).serve_forever()
