"""Ask the Hub again after a failure that passes. The client does so itself for some requests only."""

import socket
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

ATTEMPTS = 3
WAIT_SECONDS = 1.0
NO_NETWORK = (ConnectionRefusedError, socket.gaierror)
PASSING_STATUSES = (408, 429, 500, 502, 503, 504)


def with_retries[Result](
    call: Callable[[], Result], on_retry: Callable[[Exception], object] | None = None
) -> Result:
    """`call`'s result; it is called up to three times while it fails for a reason that passes.

    `call` must be able to run again after any part of it was done. on_retry: told of each failure but the
    last, which is raised.
    """
    for attempt in range(1, ATTEMPTS):
        try:
            return call()
        except Exception as error:
            if not is_passing(error):
                raise
            if on_retry is not None:
                on_retry(error)
            time.sleep(attempt * WAIT_SECONDS)
    return call()


def is_passing(error: BaseException) -> bool:
    """Whether it, or what it came from, is a broken connection or an answer that means: try again."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    if is_unreachable(error):  # which the user wants to know at once
        return False
    for each in causes(error):
        if isinstance(each, HfHubHTTPError):
            return each.response.status_code in PASSING_STATUSES
        if isinstance(each, HTTPError):
            return True
    return False


def is_unreachable(error: BaseException) -> bool:
    """Whether nobody was there to answer."""
    return any(isinstance(each, NO_NETWORK) for each in causes(error))


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on; each once, as some chains run in a circle."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def no_hub_progress() -> Generator[None]:
    """Keep huggingface_hub from drawing progress bars inside: of files as small as these they are noise."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
