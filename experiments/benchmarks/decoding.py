r"""Measures decoding against Hugging Face's `generate` and CTranslate2, with equal weights.

    pip install torch transformers        (CPU PyTorch 2.13 was used)
    pip install ctranslate2               (optional; 4.8 was used)
    python experiments/benchmarks/decoding.py [greedy] [beam] [decoder] [--rounds=5]

    greedy   a Marian model of 53M parameters: 32 sources of 32 tokens, 64 new tokens, float32
    beam     the same with 4 beams
    decoder  a GPT-2 model of 6 layers, d_model 256: 64 prompts of 64 tokens, 256 new tokens

The weights are random. eos is suppressed, so every sequence has its full length. Each system runs
in its own process, and they decode in turn: they never compute at the same time, and a drift of the
machine's speed affects all of them. PyTorch has the same allocator settings as this project. Prints
new tokens per second (the median of the rounds), the ratio to each peer over the rounds (median,
min, max), and the share of tokens that equal PyTorch's. Random weights make near ties, so a few
differ by rounding, and the rest of their sequence with them.
"""

import os
import statistics
import sys
import tempfile

from turns import SAME_ALLOCATOR, in_turn, serve

MARIAN = dict(
    vocab_size=16384,
    d_model=512,
    encoder_layers=6,
    decoder_layers=6,
    encoder_ffn_dim=2048,
    decoder_ffn_dim=2048,
    encoder_attention_heads=8,
    decoder_attention_heads=8,
    max_position_embeddings=128,
    scale_embedding=True,
    activation_function="swish",
    pad_token_id=16383,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=16383,
    forced_eos_token_id=None,
)
GPT2 = dict(
    vocab_size=8192,
    n_positions=512,
    n_embd=256,
    n_layer=6,
    n_head=4,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=8191,
)
CASES = {
    # name: sequences, input tokens, new tokens, beams
    "greedy": (32, 32, 64, 1),
    "beam": (32, 32, 64, 4),
    "decoder": (64, 64, 256, 1),
}


def inputs(case: str):
    """Returns the input tokens, int32[sequences, length]. Sources end with eos."""
    import numpy as np

    sequences, length, _, _ = CASES[case]
    tokens = np.random.default_rng(0).integers(3, 8191, (sequences, length)).astype(np.int32)
    if case != "decoder":
        tokens[:, -1] = MARIAN["eos_token_id"]
    return tokens


def suppressed(case: str) -> list[int]:
    """Returns the tokens that are never generated: eos and pad."""
    config = GPT2 if case == "decoder" else MARIAN
    return [config["eos_token_id"], config["pad_token_id"]]


def save_model(case: str, folder: str) -> None:
    """Saves the random model as a Hugging Face directory."""
    import torch
    import transformers

    torch.manual_seed(0)
    if case == "decoder":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))
    else:
        model = transformers.MarianMTModel(transformers.MarianConfig(**MARIAN))
    with torch.no_grad():  # larger weights than at initialization, so that tokens vary
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
        if case != "decoder":
            model.model.shared.weight[MARIAN["pad_token_id"]] = 0  # as in all Marian models
    model.save_pretrained(folder)


def jax_side(case: str, folder: str) -> None:
    """Serves batches decoded by this project."""
    import jax
    import numpy as np

    import transformer

    _, _, max_new, beams = CASES[case]
    config, params = transformer.load_hf(folder)
    model = transformer.build_model(config)
    tokens = inputs(case)
    limits = np.full(len(tokens), max_new)
    keys = jax.random.split(jax.random.key(0), len(tokens))
    shared = {"max_new": max_new, "suppress_tokens": suppressed(case)}

    @jax.jit
    def decode(params, tokens):
        prompt, source = (tokens, None) if case == "decoder" else (None, tokens)
        if beams == 1:
            return transformer.sample(
                model, params, prompt, limits, keys, source_BxS=source, **shared
            )
        return transformer.beam_search(
            model, params, prompt, limits, beam_size=beams, alpha=1.0, source_BxS=source, **shared
        )[0][:, 0]

    run = lambda: np.asarray(decode(params, tokens))
    serve(run, run().tolist())


def torch_side(case: str, folder: str) -> None:
    """Serves batches decoded by Hugging Face's `generate`."""
    import torch
    import transformers

    _, length, max_new, beams = CASES[case]
    cls = transformers.GPT2LMHeadModel if case == "decoder" else transformers.MarianMTModel
    model = cls.from_pretrained(folder).eval()
    tokens = torch.from_numpy(inputs(case)).long()
    skipped = length if case == "decoder" else 1

    def decode():
        with torch.inference_mode():
            out = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                num_beams=beams,
                do_sample=False,
                max_new_tokens=max_new,
                min_new_tokens=max_new,
                suppress_tokens=suppressed(case),
            )
        return out[:, skipped:].numpy()

    serve(decode, decode().tolist())


def ctranslate2_side(case: str, folder: str) -> None:
    """Serves batches decoded by CTranslate2. Its tokens are strings, here the ids."""
    import ctranslate2
    import numpy as np

    _, _, max_new, beams = CASES[case]
    options = {
        "device": "cpu",
        "compute_type": "float32",
        "intra_threads": len(os.sched_getaffinity(0)),
    }
    tokens = [[str(i) for i in sequence] for sequence in inputs(case).tolist()]
    lengths = {"beam_size": beams, "max_batch_size": 0}
    if case == "decoder":
        generator = ctranslate2.Generator(folder + "/ct2", **options)
        decode = lambda: [
            list(map(int, result.sequences_ids[0]))
            for result in generator.generate_batch(
                tokens,
                min_length=max_new,
                max_length=max_new,
                include_prompt_in_result=False,
                suppress_sequences=[[str(i)] for i in suppressed(case)],
                **lengths,
            )
        ]
    else:
        translator = ctranslate2.Translator(folder + "/ct2", **options)
        decode = lambda: [
            list(map(int, result.hypotheses[0]))
            for result in translator.translate_batch(
                tokens,
                min_decoding_length=max_new,
                max_decoding_length=max_new,
                suppress_sequences=[["2"]],
                **lengths,
            )
        ]
    serve(decode, np.asarray(decode()).tolist())


def convert_to_ctranslate2(case: str, folder: str) -> None:
    """Writes the model in CTranslate2's format. Its vocabulary is the ids as strings."""
    from ctranslate2.converters import transformers as converter

    class Converter(converter.TransformersConverter):
        def load_tokenizer(self, tokenizer_class, model_name_or_path, **kwargs):
            return None

    def set_config(self, config, model, tokenizer):
        config.bos_token, config.eos_token, config.unk_token = "1", "2", "1"
        if case != "decoder":
            config.decoder_start_token = "2"  # Marian starts from a zero embedding

    # CTranslate2 removes the pad token of a Marian model, which is the last one.
    size, loader = (
        (GPT2["vocab_size"], converter.GPT2Loader)
        if case == "decoder"
        else (MARIAN["vocab_size"] - 1, converter.MarianMTLoader)
    )
    loader.get_vocabulary = lambda self, model, tokenizer: [str(i) for i in range(size)]
    loader.set_config = set_config
    Converter(folder).convert(folder + "/ct2")


SIDES = {"jax": jax_side, "torch": torch_side, "ctranslate2": ctranslate2_side}


def compare(case: str, rounds: int) -> None:
    """Runs one case on all systems, in turn, and prints the results."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(case, folder)
        sides = ["jax", "torch"]
        try:
            convert_to_ctranslate2(case, folder)
            sides.append("ctranslate2")
        except ImportError:
            print("ctranslate2 is not installed")
        quiet = {"JAX_PLATFORMS": "cpu", "TRANSFORMERS_VERBOSITY": "error"} | SAME_ALLOCATOR
        commands = {side: ([__file__, f"--side={side}", case, folder], quiet) for side in sides}
        report(case, *in_turn(commands, rounds))


def report(case: str, tokens: dict[str, list], times: dict[str, list[float]]) -> None:
    """Prints the rates, the ratios of the rounds and the shares of equal tokens."""
    sequences, _, max_new, _ = CASES[case]
    for side, seconds in times.items():
        line = (
            f"{case:<8} {side:<12}{sequences * max_new / statistics.median(seconds):7.0f} tokens/s"
        )
        if side != "jax":
            ratios = [peer / ours for ours, peer in zip(times["jax"], seconds, strict=True)]
            line += (
                f"   this project is {statistics.median(ratios):.2f}x as fast "
                f"({min(ratios):.2f} to {max(ratios):.2f})"
            )
        if side != "torch":
            pairs = [
                a == b
                for ours, theirs in zip(tokens[side], tokens["torch"], strict=True)
                for a, b in zip(ours, theirs, strict=False)
            ]
            line += f"   {sum(pairs) / sequences / max_new:.1%} of tokens equal PyTorch's"
        print(line, flush=True)


def main() -> None:
    options = dict(a.removeprefix("--").partition("=")[::2] for a in sys.argv[1:] if a[:2] == "--")
    cases = [a for a in sys.argv[1:] if a[:2] != "--"]
    if "side" in options:
        SIDES[options["side"]](*cases)
        return
    for case in cases or CASES:
        compare(case, int(options.get("rounds", 5)))


if __name__ == "__main__":
    main()
