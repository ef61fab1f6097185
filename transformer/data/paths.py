"""Paths that a config names: local, or in a bucket that etils.epath can read."""

from etils import epath

from transformer.errors import UserError


def as_path(text: str, field: str) -> epath.Path:
    """The path that `text` names. Raises UserError, which names `field`, if nothing here reads paths of that kind."""
    scheme, found, _ = text.partition("://")
    if "\0" in text:
        raise UserError(f"{field}: {text!r} holds a NUL character; no path does")
    try:
        path = epath.Path(text)
        if found:
            path.exists()  # imports what reads the bucket
    except KeyError:
        raise UserError(
            f"{field}: {text}: {scheme}:// cannot be read; download the file, or name a local path or gs://"
        ) from None
    except ImportError as e:
        way_out = (
            "the extra [gcs]: pip install -e '.[gcs]'" if scheme == "gs" else f"a package ({e})"
        )
        raise UserError(f"{field}: {text} needs {way_out}") from None
    return path
