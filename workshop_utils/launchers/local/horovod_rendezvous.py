"""The key-value server at which Horovod's ranks find each other when they use Gloo.

`horovodrun` has such a server too, on every network interface; this one listens on one address: `python -I
horovod_rendezvous.py HOST PORT`. It needs Horovod and the standard library.
"""

import socket
import sys

# A rank asks three times within a second and a half, and then aborts. On a busy machine the import of Horovod takes
# longer, so listen first: whoever comes too early waits.
LISTENER = socket.create_server((sys.argv[1], int(sys.argv[2])), backlog=1024)

from horovod.runner.http.http_server import KVStoreHandler, RendezvousHTTPServer  # noqa: E402


class Handler(KVStoreHandler):
    """PUT and GET of `/scope/key`, with 404 for what is not there yet: the client asks again."""

    def do_DELETE(self) -> None:  # noqa: N802 (the name is the protocol's)
        """A rank leaves; what it stored may be asked for by slower ones, so it stays until the run's end."""
        self.send_status_code(200)

    do_HEAD = do_DELETE  # noqa: N815 (so is this; Python's own would tell of files)


class Server(RendezvousHTTPServer):
    """The server, for many ranks that all come at once."""

    request_queue_size = 1024  # the default of 5 makes the kernel turn ranks away

    def server_bind(self) -> None:
        """Take the socket that listens already."""
        self.server_close()  # that of its own making
        self.socket = LISTENER

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing about a rank that died while it asked: the launcher reports it better."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


if __name__ == "__main__":
    Server(LISTENER.getsockname(), Handler, 0).serve_forever()
