"""Conversion of Hugging Face directories to runs and back, with one copy of the parameters."""

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax
import optax

from transformer import buckets
from transformer.config import DataConfig, Experiment, TokenizerConfig, TrainConfig
from transformer.convert.hf import open_directory, read_params, save_hf
from transformer.convert.special_tokens import read_id
from transformer.data.pipeline import check_special_tokens, special_tokens
from transformer.data.tokenizer import Fast, SentencePiece, Tokenizer, TokenizerPair, load_tokenizer
from transformer.errors import UserError
from transformer.files import new_folder, read_json
from transformer.mapping import apply_overrides
from transformer.model.config import ModelConfig
from transformer.model.layout import flatten
from transformer.model.network import build_model
from transformer.model.special_tokens import as_tuple
from transformer.parallel.mesh import check_memory, start, use
from transformer.parallel.sharding import place
from transformer.runs import rundir
from transformer.runs.checkpoint import Checkpoints
from transformer.runs.evaluate import LoadedRun
from transformer.training.state import abstract_state


def from_hf(directory: Path, workdir: Path, overrides: Mapping[str, str]) -> Experiment:
    """Creates a run in `workdir` with the parameters of a Hugging Face directory, loaded one at a
    time and created sharded. It can generate text, be evaluated on a given text and be trained
    further (train.init_from). A UserError leaves no run behind."""
    rundir.check_folder(workdir)
    if workdir.exists() and (not workdir.is_dir() or any(workdir.iterdir())):
        raise UserError(f"--workdir: {workdir} exists and is not an empty folder; choose another")
    family, hf_config, tensors = open_directory(directory)
    model = family.our_config(hf_config, frozenset(tensors.names))
    tokenizer_config = _tokenizer_config(hf_config, model, family.source_begins)
    tokenizer = _tokenizer(directory, tokenizer_config)
    if tokenizer is not None:
        model = _with_special_tokens(model, tokenizer)
    config = apply_overrides(_experiment(model, tokenizer_config), overrides)
    if tokenizer is not None:
        check_special_tokens(config.model, tokenizer)
    # In a bucket, nothing can be renamed. There, the run appears when its files are synchronized.
    folder = contextlib.nullcontext(workdir) if buckets.url_of(workdir) else new_folder(workdir)
    with use(start(config.platform, config.mesh)) as mesh, folder as unfinished:
        model = build_model(config.model)
        abstract, shardings = abstract_state(config, model, optax.identity(), mesh)
        check_memory(abstract.params, mesh, "parameters")
        sharding_of = flatten(shardings.params)
        put = lambda path, x: place(x, sharding_of[path])
        params = read_params(family, config.model, tensors, put)
        parameters = sum(x.size for x in jax.tree.leaves(params))
        origin = {"parameters": parameters, "converted_from": str(directory.resolve())}
        checkpoints = Checkpoints(unfinished, config.train)
        checkpoints.save_params(params)
        checkpoints.close()
        rundir.record_start(unfinished, config, mesh, tokenizer, origin)
    return config


def to_hf(trained: LoadedRun, target: Path, family: str | None) -> None:
    """Writes a run's model, with its evaluation parameters, as a Hugging Face directory."""
    files, model = {}, trained.config.model
    with use(trained.mesh):
        if trained.tokenizer is not None:
            files, model = trained.tokenizer.files, _with_special_tokens(model, trained.tokenizer)
        save_hf(target, model, trained.params, family, files=files)


def _with_special_tokens(model: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    tokens = special_tokens(model, tokenizer).items()
    unset = {field: token for field, token in tokens if getattr(model, field) is None}
    return dataclasses.replace(model, **unset)


def _tokenizer_config(hf_config: Mapping, model: ModelConfig, source_begins) -> TokenizerConfig:
    """Returns the special tokens that config.json sets; -1 where the tokenizer's own token is used.
    Of several end tokens, the tokenizer writes the first. It also pads if there is no padding."""
    first_id = lambda ids: next(iter(as_tuple(ids)), -1)
    pad, bos, eos = first_id(model.pad_id), first_id(model.bos_id), first_id(model.eos_id)
    if model.family == "encoder":
        names = ("cls_token_id", "sep_token_id")
        bos, eos = (first_id(read_id(hf_config, name, model.vocab_size)) for name in names)
    source_bos = bos if source_begins else -1
    if model.is_encoder_decoder:
        bos = first_id(model.decoder_start_id)
    elif model.family == "decoder" and bos < 0:
        bos = eos
    pad = pad if pad >= 0 else eos
    return TokenizerConfig(pad_id=pad, bos_id=bos, eos_id=eos, source_bos_id=source_bos)


def _experiment(model: ModelConfig, tokenizer_config: TokenizerConfig) -> Experiment:
    if not model.lm_head and not model.num_labels:  # its objective would require train.init_from
        needed = "a run needs a language-model head or a classifier"
        raise UserError(f"this {model.family} has no head; {needed}")
    objectives = {"encoder": "masked_lm", "decoder": "causal_lm", "encoder_decoder": "seq2seq"}
    objective = objectives[model.family]
    if not model.lm_head:
        of_tokens = {"none": "tagging", "span": "extractive_qa"}
        objective = of_tokens.get(model.pooling, "classification")
    shape = {"length": min(model.max_length, 512), "packing": model.lm_head}
    data = DataConfig(objective=objective, tokenizer=tokenizer_config, **shape)
    return Experiment(model, data, train=TrainConfig(steps=1))


def _tokenizer(directory: Path, tokenizer_config: TokenizerConfig) -> Tokenizer | None:
    file, content = directory / "tokenizer.json", None
    for name in ("spiece.model", "tokenizer.model"):  # preferred: ids without added tokens
        model = directory / name
        if model.is_file() and (SentencePiece.can_read(model.read_bytes()) or not file.is_file()):
            return load_tokenizer(model, tokenizer_config)
    if file.is_file():
        return load_tokenizer(file, tokenizer_config)
    pair = [directory / name for name in ("source.spm", "target.spm", "vocab.json")]
    if all(part.is_file() for part in pair):
        source, target, vocabulary = pair
        joined = TokenizerPair.join(source.read_bytes(), target.read_bytes(), read_json(vocabulary))
        return TokenizerPair(joined, tokenizer_config, str(directory))
    with contextlib.suppress(ImportError):
        import tokenizers

        bpe, words = [directory / "vocab.json", directory / "merges.txt"], directory / "vocab.txt"
        if all(part.is_file() for part in bpe):
            content = tokenizers.ByteLevelBPETokenizer(*map(str, bpe))
        elif words.is_file():
            settings_file = directory / "tokenizer_config.json"
            settings = read_json(settings_file) if settings_file.is_file() else {}
            lower = bool(settings.get("do_lower_case", True))
            content = tokenizers.BertWordPieceTokenizer(str(words), lowercase=lower)
    if content is None:
        return None
    known = ("<s>", "</s>", "<pad>", "<mask>", "<|endoftext|>")
    content.add_special_tokens([x for x in known if content.token_to_id(x) is not None])
    return Fast(content.to_str().encode("utf-8"), tokenizer_config, str(directory))
