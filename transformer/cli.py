"""python -m transformer VERB: the command line, thin over the package."""

import argparse
import contextlib
import errno
import importlib
import os
import sys
import time
import traceback

from transformer.errors import UserError, nearest, tracebacks
from transformer.output import flush, outlives_its_readers, to_nowhere

ABOUT = """Transformers in JAX: train, evaluate and use any architecture, from one experiment file, on any machine.

  python -m transformer train    --config=experiments/quickstart.py --workdir=runs/quickstart
  python -m transformer evaluate --workdir=runs/quickstart
  echo "Where is the library?" | python -m transformer generate --workdir=runs/quickstart
"""

VERBS = ("data", "train", "evaluate", "generate", "sweep", "compare", "inspect", "plan", "convert")
"""Files in verbs/, in the order in which help shows them."""


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code. Mistakes of the user's print one line and return 2."""
    try:
        return _main(sys.argv[1:] if argv is None else argv)
    except UserError as e:
        _say(f"error: {e}")
        _leave_the_others(2)
        return 2
    except BrokenPipeError:
        to_nowhere(sys.stdout)
        return 0
    except OSError as e:
        reason = "the disk is full" if e.errno == errno.ENOSPC else e.strerror or str(e)
        _say(f"error: {e.filename or type(e).__name__}: {reason}")
        _leave_the_others(2)
        return 2
    except RuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e) and "Out of memory" not in str(e):
            _leave_the_others(1, e)
            raise
        _say(
            f"error: out of memory ({str(e).splitlines()[0][:120]}); lower data.batch_size or the model, raise train.accumulate, "
            "set model.remat='full', or spread the parameters with mesh.fsdp"
        )
        _leave_the_others(2)
        return 2
    except KeyboardInterrupt:
        _say("\ninterrupted")
        _leave_the_others(130)
        return 130
    except Exception as e:
        _leave_the_others(1, e)
        raise


def _say(line: str) -> None:
    """Why a command ends. If nobody reads it, the command ends in the same way."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr)


def _leave_the_others(code: int, error: Exception | None = None) -> None:
    """One of several processes ends at once: it would wait for the others, which may wait for it. They notice, and end too."""
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized():
        if error is not None:
            from transformer.parallel.processes import end_alone, is_loss

            if is_loss(error) and not tracebacks():
                time.sleep(3)  # who is told which process it is says so meanwhile
                end_alone("another process of this run")
            with contextlib.suppress(OSError):
                traceback.print_exception(error)
        flush()
        os._exit(code)


class _Parser(argparse.ArgumentParser):
    """Its errors are those of the rest: one line."""

    def error(self, message: str):
        raise UserError(f"{message}; see {self.prog} --help")


def _main(argv: list[str]) -> int:
    spelled = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = _Parser(prog="python -m transformer", description=ABOUT, **spelled)
    verbs = parser.add_subparsers(metavar="VERB", title="verbs")
    for name in VERBS:
        verb = importlib.import_module(f"transformer.verbs.{name}")
        sub = verbs.add_parser(
            name, help=verb.ABOUT, description=verb.DETAIL or verb.ABOUT, **spelled
        )
        only_prints = getattr(verb, "ONLY_PRINTS", False)
        lasting = contextlib.nullcontext if only_prints else outlives_its_readers
        sub.set_defaults(run=verb.run, verb=name, lasting=lasting)
        verb.arguments(sub)
    if argv and not argv[0].startswith("-") and argv[0] not in VERBS:
        raise UserError(f"no verb {argv[0]!r}; {nearest(argv[0], VERBS)}")
    args, rest = parser.parse_known_args(argv)
    if "run" not in args:
        parser.print_help()
        return 0
    with args.lasting():
        return args.run(args, _overrides(rest)) or 0


def _overrides(rest: list[str]) -> dict[str, str]:
    """`--config.a.b=v` arguments as {"a.b": "v"}."""
    found, rest = {}, list(rest)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("--config."):
            raise UserError(
                f"no argument {arg!r}; fields of the experiment are set with --config.SECTION.FIELD=VALUE, and --help shows the rest"
            )
        key, equals, value = arg.removeprefix("--config.").partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise UserError(f"{arg}: no value; write {arg}=VALUE")
            value = rest.pop(0)
        found[key] = value
    return found
