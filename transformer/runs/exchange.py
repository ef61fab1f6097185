"""Hugging Face directories to run directories, and back, with their tokenizers. Nothing holds a model twice."""

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path

import jax
from jax.sharding import Mesh

from transformer.config import DataConfig, Experiment, TokenizerConfig, TrainConfig
from transformer.convert.hf import open_directory, read_params, save_hf
from transformer.convert.special_tokens import read_id
from transformer.data.pipeline import check_special_tokens, special_tokens
from transformer.data.tokenizer import Fast, Pair, Tokenizer, is_sentencepiece, load_tokenizer
from transformer.errors import UserError
from transformer.runs.evaluate import load_trained
from transformer.files import disk_faults, read_json
from transformer.mapping import apply_overrides
from transformer.model.config import ModelConfig
from transformer.model.layout import flatten
from transformer.model.network import build_model
from transformer.model.special_tokens import as_tuple
from transformer.parallel.mesh import check_memory, start, use
from transformer.runs import rundir
from transformer.runs.checkpoint import Checkpoints
from transformer.training.optimizer import build_optimizer
from transformer.training.state import abstract_state


def from_hf(directory: Path, workdir: Path, overrides: Mapping[str, str]) -> Experiment:
    """Makes `workdir` a run whose parameters are those of a Hugging Face directory: born sharded, one at a time. It can be generated
    from, evaluated on a text that is named then and, with train.init_from, trained on. Raises UserError, and leaves no run."""
    rundir.check_folder(workdir)
    if workdir.exists() and (not workdir.is_dir() or any(workdir.iterdir())):
        raise UserError(
            f"--workdir: {workdir} is already there, and not an empty folder; name another"
        )
    family, theirs, tensors = open_directory(directory)
    model = family.our_config(theirs, frozenset(tensors.names))
    signs = _signs(theirs, model, family.source_begins)
    tokenizer = _tokenizer(directory, signs)
    if tokenizer is not None:
        model = _with_special_tokens(model, tokenizer)
    config = apply_overrides(_experiment(model, signs), overrides)
    if tokenizer is not None:
        check_special_tokens(config.model, tokenizer)
    workdir.parent.mkdir(parents=True, exist_ok=True)
    with (
        use(start(config.platform, config.mesh)) as mesh,
        disk_faults(workdir),
        tempfile.TemporaryDirectory(dir=workdir.parent, prefix=workdir.name + ".") as unfinished,
    ):
        abstract, placed = abstract_state(
            config, build_model(config.model), build_optimizer(config.optimizer, 1), mesh
        )
        check_memory(abstract.params, mesh, "parameters")
        shardings = flatten(placed.params)
        place = lambda path, x: jax.make_array_from_callback(
            x.shape, shardings[path], lambda index: x[index]
        )
        params = read_params(family, config.model, tensors, place)
        whole = Path(unfinished) / "run"
        count = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
        rundir.claim(
            whole, config, mesh, count, tokenizer, {"converted_from": str(directory.resolve())}
        )
        checkpoints = Checkpoints(whole, config.train)
        checkpoints.save_params(params)
        checkpoints.close()
        if workdir.exists():
            workdir.rmdir()
        whole.rename(workdir)
    return config


def to_hf(
    workdir: Path, directory: Path, config: Experiment, mesh: Mesh, family: str | None
) -> None:
    """Writes the model of a run, as it would be evaluated, as a Hugging Face directory."""
    files, model = {}, config.model
    with use(mesh):
        trained = load_trained(workdir, config, mesh)
        if trained.tokenizer is not None:
            files, model = trained.tokenizer.files, _with_special_tokens(model, trained.tokenizer)
        save_hf(directory, model, {"params": trained.params}, family, files=files)


def _with_special_tokens(model: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """The config with the tokenizer's special tokens where it names none."""
    unset = {
        field: token
        for field, token in special_tokens(model, tokenizer).items()
        if getattr(model, field) is None
    }
    return dataclasses.replace(model, **unset)


def _signs(theirs: Mapping, model: ModelConfig, source_begins: bool) -> TokenizerConfig:
    """The special tokens of a tokenizer, as config.json has them; -1 where it has none and the tokenizer is asked. Of several
    ends a tokenizer writes the first; without padding, that is the end."""
    first = lambda ids: next(iter(as_tuple(ids)), -1)
    pad, bos, eos = first(model.pad_id), first(model.bos_id), first(model.eos_id)
    if model.family == "encoder":
        names = ("cls_token_id", "sep_token_id")
        bos, eos = (first(read_id(theirs, name, model.vocab_size)) for name in names)
    source_bos = bos if source_begins else -1
    if model.two_sides:
        bos = first(model.decoder_start_id)
    elif model.family == "decoder" and bos < 0:
        bos = eos
    return TokenizerConfig(
        pad_id=pad if pad >= 0 else eos, bos_id=bos, eos_id=eos, source_bos_id=source_bos
    )


def _experiment(model: ModelConfig, signs: TokenizerConfig) -> Experiment:
    """What a run's config.json says of a model that was not trained here."""
    if not model.lm_head and not model.num_labels:  # its objective would come with train.init_from
        raise UserError(
            f"an {model.family} without a head for words or labels cannot be a run; convert one that has a head"
        )
    objective = {"encoder": "masked_lm", "decoder": "causal_lm", "encoder_decoder": "seq2seq"}[
        model.family
    ]
    if not model.lm_head:
        objective = "tagging" if model.pooling == "none" else "classification"
    data = DataConfig(
        objective=objective,
        length=min(model.max_length, 512),
        packing=model.lm_head,
        tokenizer=signs,
    )
    return Experiment(model, data, train=TrainConfig(steps=1))


def _tokenizer(directory: Path, signs: TokenizerConfig) -> Tokenizer | None:
    """Theirs, where it is SentencePiece or `tokenizers` can read it."""
    file, content = directory / "tokenizer.json", None
    for name in (
        "spiece.model",
        "tokenizer.model",
    ):  # where both are there, its ids are the model's without added signs
        if (directory / name).is_file() and (
            is_sentencepiece((directory / name).read_bytes()) or not file.is_file()
        ):
            return load_tokenizer(directory / name, signs)
    if file.is_file():
        return load_tokenizer(file, signs)
    pair = [directory / name for name in ("source.spm", "target.spm", "vocab.json")]
    if all(part.is_file() for part in pair):
        source, target, vocabulary = pair
        joined = Pair.join(source.read_bytes(), target.read_bytes(), read_json(vocabulary))
        return Pair(joined, signs, str(directory))
    with contextlib.suppress(ImportError):
        import tokenizers

        if (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
            content = tokenizers.ByteLevelBPETokenizer(
                str(directory / "vocab.json"), str(directory / "merges.txt")
            )
        elif (directory / "vocab.txt").is_file():
            given = (
                read_json(directory / "tokenizer_config.json")
                if (directory / "tokenizer_config.json").is_file()
                else {}
            )
            lower = bool(given.get("do_lower_case", True))
            content = tokenizers.BertWordPieceTokenizer(
                str(directory / "vocab.txt"), lowercase=lower
            )
    if content is None:
        return None
    signs_there = [
        t
        for t in ("<s>", "</s>", "<pad>", "<mask>", "<|endoftext|>")
        if content.token_to_id(t) is not None
    ]
    content.add_special_tokens(signs_there)
    return Fast(content.to_str().encode("utf-8"), signs, str(directory))
