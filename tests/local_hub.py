"""A Hub on this machine: the part of its HTTP API that publishing and loading a kernel takes, and its faults.

The clients are the unmodified huggingface_hub and kernels with HF_ENDPOINT set to `LocalHub.endpoint`. Large
files go by LFS (HF_HUB_DISABLE_XET=1); the Xet protocol is not spoken.
"""

import threading
from http.server import ThreadingHTTPServer
from typing import Self

from hub_requests import HubRequestHandler
from hub_state import HubState


class LocalHub(HubState):
    """A context in which the Hub is served on loopback."""

    def __enter__(self) -> Self:
        # http.server makes a handler for each request, and gives it nothing of ours.
        handler = type("Handler", (HubRequestHandler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"
