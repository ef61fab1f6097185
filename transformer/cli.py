"""The command line, `python -m transformer VERB`: a thin layer over the package."""

import argparse
import contextlib
import errno
import importlib
import os
import sys
import time
import traceback
from pathlib import Path

from transformer import buckets
from transformer.errors import UserError, from_os_error, nearest, tracebacks
from transformer.output import RED, flush, redirect_to_devnull, styled, survive_closed_readers

ABOUT = """Transformers in JAX: train, evaluate and use encoders, decoders and encoder-decoders.

  python -m transformer train    --config=experiments/quickstart.py --workdir=runs/quickstart
  python -m transformer evaluate --workdir=runs/quickstart
  echo "Where is the library?" | python -m transformer generate --workdir=runs/quickstart"""

VERBS = "data train evaluate generate score sweep compare inspect plan convert".split()
"""The modules in verbs/, in the order of the help text."""


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code. User errors print one line."""
    try:
        return _main(sys.argv[1:] if argv is None else argv)
    except UserError as e:
        return _fail(e)
    except BrokenPipeError:
        redirect_to_devnull(sys.stdout)
        return 0
    except OSError as e:
        reason = "the disk is full" if e.errno == errno.ENOSPC else e.strerror or str(e)
        return _fail(from_os_error(e, f"{e.filename or type(e).__name__}: {reason}"))
    except KeyboardInterrupt:
        _print_error("\ninterrupted")
        _exit_if_distributed(130)
        return 130
    except Exception as e:
        out_of_memory = "RESOURCE_EXHAUSTED" in str(e) or "Out of memory" in str(e)
        if out_of_memory and isinstance(e, RuntimeError):
            smaller = "reduce data.batch_size or the model's size, increase train.accumulate"
            way_out = f"{smaller}, set model.remat='full', or spread the parameters with mesh.fsdp"
            return _fail(UserError(f"out of memory ({str(e).splitlines()[0][:120]}); {way_out}"))
        _exit_if_distributed(1, e)
        raise


def _fail(error: UserError) -> int:
    _print_error(f"error: {buckets.shown(error)}")
    _exit_if_distributed(error.exit_code)
    return error.exit_code


def _print_error(line: str) -> None:
    """Prints the reason why a command ends. Ignores a closed standard error."""
    with contextlib.suppress(OSError):
        print(styled(line, RED, sys.stderr), file=sys.stderr)


def _exit_if_distributed(code: int, error: Exception | None = None) -> None:
    """Ends this process at once if it is one of several, without waiting for the others."""
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized():
        if error is not None:
            from transformer.parallel.processes import exit_after_loss, is_lost_process

            if is_lost_process(error) and not tracebacks():
                time.sleep(3)  # the thread that watches connections may name the lost process
                exit_after_loss("another process of this run")
            with contextlib.suppress(OSError):
                traceback.print_exception(error)
        flush()
        os._exit(code)


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises its errors as UserError, so that they take one line."""

    def error(self, message: str):
        raise UserError(f"{message}; see {self.prog} --help")


def _main(argv: list[str]) -> int:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = _Parser(prog="python -m transformer", description=ABOUT, **style)
    verbs = parser.add_subparsers(metavar="VERB", title="verbs")
    for name in VERBS:
        verb = importlib.import_module(f"transformer.verbs.{name}")
        title, _, detail = (verb.__doc__ or "").partition("\n\n")
        about = title.partition(": ")[2].rstrip(".")
        sub = verbs.add_parser(name, help=about, description=detail or about, **style)
        sub.set_defaults(run=verb.run, verb=name, only_prints=False)
        verb.arguments(sub)
    if argv and not argv[0].startswith("-") and argv[0] not in VERBS:
        raise UserError(f"no verb {argv[0]!r}; {nearest(argv[0], VERBS)}")
    args, remaining = parser.parse_known_args(argv)
    if "run" not in args:
        parser.print_help()
        return 0
    values = [x for v in vars(args).values() for x in (v if isinstance(v, list) else [v])]
    lasting = contextlib.nullcontext if args.only_prints else survive_closed_readers
    with lasting(), buckets.closing():
        for folder in (x for x in values if isinstance(x, Path)):
            buckets.open_folder(folder)
        return args.run(args, _overrides(remaining)) or 0


def _overrides(remaining: list[str]) -> dict[str, str]:
    """Parses `--config.a.b=v` arguments into {"a.b": "v"}."""
    overrides, arguments = {}, iter(remaining)
    for arg in arguments:
        if not arg.startswith("--config."):
            way_out = "set fields of the experiment with --config.SECTION.FIELD=VALUE"
            raise UserError(f"no argument {arg!r}; {way_out}; see --help for other arguments")
        key, equals, value = arg.removeprefix("--config.").partition("=")
        if not equals and (value := next(arguments, "--")).startswith("--"):
            raise UserError(f"{arg}: no value; write {arg}=VALUE")
        overrides[key] = value
    return overrides
