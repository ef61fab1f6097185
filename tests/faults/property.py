"""What every fuzzer asks: the right result, or one line that a person can use."""

import time
import warnings
from collections.abc import Callable

from transformer.errors import LONGEST, UserError


def right_or_one_line(case, act: Callable[[], None], seconds: float = 2.0) -> str | None:
    """Runs `act`, which raises AssertionError for a wrong result. Returns the message of its UserError, None if there is none. Raises
    AssertionError, which shows the case, for any other exception, for a warning, a message that is no single line, and a slow answer."""
    message, began = None, time.process_time()  # other work may slow this machine
    try:
        with warnings.catch_warnings(action="error"):
            act()
    except UserError as e:
        message = str(e)
    except AssertionError as e:
        raise AssertionError(f"{case}: {e}") from e
    except Exception as e:
        raise AssertionError(f"{case}: {type(e).__name__}: {str(e)[:300]}") from e
    spent = time.process_time() - began
    assert spent < seconds, f"{case}: {spent:.1f} s"
    if message is not None:
        assert message.strip() and len(message.splitlines()) == 1, f"{case}: {message!r}"
        assert len(message) <= LONGEST and message.isprintable(), f"{case}: {message!r}"
    return message
