"""The key-value server at which Horovod's ranks find each other when they use Gloo.

`horovodrun` has such a server too, on every network interface; this one listens on one address: `python -I
horovod_rendezvous.py HOST PORT`. It needs Horovod and the standard library.
"""

import sys

from horovod.runner.http.http_server import KVStoreHandler, RendezvousHTTPServer


class Handler(KVStoreHandler):
    """PUT and GET of `/scope/key`, with 404 for what is not there yet: the client asks again."""

    def do_DELETE(self) -> None:  # noqa: N802 (the name is the protocol's)
        """A rank leaves; what it stored may be asked for by slower ones, so it stays until the run's end."""
        self.send_status_code(200)

    do_HEAD = do_DELETE  # noqa: N815 (so is this; Python's own would tell of files)


class Server(RendezvousHTTPServer):
    """The server, for many ranks that all come at once."""

    request_queue_size = 1024  # the default of 5 makes the kernel turn ranks away

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing about a rank that died while it asked: the launcher reports it better."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


if __name__ == "__main__":
    host, port = sys.argv[1:]
    Server((host, int(port)), Handler, 0).serve_forever()
