"""The property that every fuzzer checks: a correct result, or an error of one line."""

import time
import warnings
from collections.abc import Callable

from transformer.errors import LONGEST, UserError


def assert_right_or_one_line(case, act: Callable[[], None], seconds: float = 2.0) -> str | None:
    """Runs `act`, which raises AssertionError for a wrong result.

    Returns the message of the UserError that `act` raises, or None. Raises AssertionError with the
    case for any other exception, a warning, a message that is not a single printable line of at
    most LONGEST characters, and a runtime of `seconds` or more.
    """
    # Processor time, because other programs may slow the machine.
    message, start = None, time.process_time()
    try:
        with warnings.catch_warnings(action="error"):
            act()
    except UserError as e:
        message = str(e)
    except AssertionError as e:
        raise AssertionError(f"{case}: {e}") from e
    except Exception as e:
        raise AssertionError(f"{case}: {type(e).__name__}: {str(e)[:300]}") from e
    elapsed = time.process_time() - start
    assert elapsed < seconds, f"{case}: {elapsed:.1f} s"
    if message is not None:
        assert message.strip() and len(message.splitlines()) == 1, f"{case}: {message!r}"
        assert len(message) <= LONGEST and message.isprintable(), f"{case}: {message!r}"
    return message
