"""Paths in a config: local, or in a bucket that etils.epath can read."""

from etils import epath

from transformer.errors import UserError


def as_path(text: str, field: str) -> epath.Path:
    """The path of `text`. Raises UserError for `field` if no installed package can read it."""
    scheme, separator, _ = text.partition("://")
    if "\0" in text:
        raise UserError(f"{field}: {text!r} contains a NUL character; remove it")
    try:
        path = epath.Path(text)
        if separator:
            path.exists()  # imports the package that reads the bucket
    except KeyError:
        way_out = "download the file, or use a local path or gs://"
        raise UserError(f"{field}: {text!r} cannot be read; {way_out}") from None
    except ImportError as e:
        gcs = "the extra [gcs]: pip install -e '.[gcs]'"
        needed = gcs if scheme == "gs" else f"a package ({e})"
        raise UserError(f"{field}: {text} needs {needed}") from None
    return path
