"""Fixtures: model directories as Transformers writes them, with tokenizers."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the test extra brings it")
transformers = pytest.importorskip("transformers", reason="the test extra brings it")
tokenizers = pytest.importorskip("tokenizers", reason="the test extra brings it")

WORDS = (
    ["the cat", "a dog", "my friend", "the bird"],
    ["sleeps", "eats", "runs", "sings"],
    ["today", "at home", "here", "now!"],
)


TEXTS = [f"{a} {b} {c}" for a in WORDS[0] for b in WORDS[1] for c in WORDS[2]]


def save(model_class: str, config, folder: Path, seed: int = 0) -> None:
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        # Far from their initial values, so that the logits vary.
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """GPT-2 with vocab.json and merges.txt, as on the hub.

    One special token is BOS, EOS and padding.
    """
    folder = tmp_path_factory.mktemp("hf") / "gpt2"
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        TEXTS, vocab_size=300, special_tokens=["<unk>", "<|endoftext|>"], show_progress=False
    )
    end = tokenizer.token_to_id("<|endoftext|>")
    config = transformers.GPT2Config(
        vocab_size=300,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=end,
        eos_token_id=end,
    )
    save("GPT2LMHeadModel", config, folder)
    tokenizer.save_model(str(folder))
    return folder


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """T5 with spiece.model; the decoder's start token is the padding token, and there is no BOS."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("hf") / "t5"
    folder.mkdir()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=str(folder / "spiece"), vocab_size=60,
        hard_vocab_limit=False,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    (folder / "spiece.vocab").unlink()
    config = transformers.T5Config(
        vocab_size=70, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    save("T5ForConditionalGeneration", config, folder, seed=3)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """BERT with tokenizer.json, whose special tokens are BERT's."""
    folder = tmp_path_factory.mktemp("hf") / "bert"
    tokenizer = tokenizers.BertWordPieceTokenizer(lowercase=True)
    tokenizer.train_from_iterator(TEXTS, vocab_size=120, show_progress=False)
    config = transformers.BertConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=48, max_position_embeddings=64,
    )  # fmt: skip
    save("BertForMaskedLM", config, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def marian(tmp_path_factory):
    """Marian with two SentencePiece models and one separately ordered vocabulary, as in OPUS-MT."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("hf") / "marian"
    folder.mkdir()
    pieces = {">>deu<<"}
    for name, texts in {"source": TEXTS, "target": [text.upper() for text in TEXTS]}.items():
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_prefix=str(folder / name), vocab_size=40,
            hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip
        (folder / f"{name}.model").rename(folder / f"{name}.spm")
        lines = (folder / f"{name}.vocab").read_text().splitlines()
        (folder / f"{name}.vocab").unlink()
        pieces |= {line.split("\t")[0] for line in lines} - {"<s>", "</s>", "<unk>", "\u2581hom"}
    names = ["</s>", "<unk>", *sorted(pieces), "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(names)}))
    pad = len(names) - 1
    config = transformers.MarianConfig(
        vocab_size=len(names), d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_ffn_dim=48, decoder_ffn_dim=48,
        encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=64,
        pad_token_id=pad, eos_token_id=0, forced_eos_token_id=None, decoder_start_token_id=pad,
    )  # fmt: skip
    save("MarianMTModel", config, folder)
    return folder


@pytest.fixture(scope="module")
def bart(tmp_path_factory):
    """BART, whose sources begin with a special token."""
    folder = tmp_path_factory.mktemp("hf") / "bart"
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    special_tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer.train_from_iterator(
        TEXTS, vocab_size=300, special_tokens=special_tokens, show_progress=False
    )
    config = transformers.BartConfig(
        vocab_size=300, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_ffn_dim=48, decoder_ffn_dim=48,
        encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=64,
        forced_eos_token_id=None,
    )  # fmt: skip
    save("BartForConditionalGeneration", config, folder)
    tokenizer.save_model(str(folder))
    return folder
