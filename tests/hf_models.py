"""Makes models of Transformers with random weights."""

import pytest
from hf_cases import VOCAB

torch = pytest.importorskip("torch", reason="the test extra brings it")
transformers = pytest.importorskip("transformers", reason="the test extra brings it")


def make_hf_model(name: str, options: dict, seed: int = 0):
    """Returns a model of Transformers; all parameters and buffers that it saves are perturbed."""
    cls = getattr(transformers, name)
    settings = {name: x for name, x in options.items() if name == "add_pooling_layer"}
    config = cls.config_class(
        vocab_size=VOCAB, **{name: x for name, x in options.items() if name not in settings}
    )
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = cls(config, **settings).eval().float()
    # Marian's sinusoids are a fixed buffer. T5 does not scale its attention logits, so large
    # weights make it ill-conditioned.
    fixed, noise = (
        ("embed_positions" if name.startswith("Marian") else None),
        0.1 if name.startswith(("T5", "MT5")) else 0.3,
    )
    with torch.no_grad():
        for key, x in model.state_dict().items():
            if x.is_floating_point() and not (fixed and fixed in key):
                x.add_(noise * torch.randn_like(x))
        if name.startswith(
            ("Bart", "Marian", "MBart", "M2M100")
        ):  # encoder and decoder share one table, tied or not
            for side in (model.model.encoder, model.model.decoder):
                side.embed_tokens.weight.copy_(model.model.shared.weight)
        head = getattr(model, "lm_head", getattr(getattr(model, "cls", None), "predictions", None))
        if isinstance(getattr(head, "decoder", None), torch.nn.Linear) and hasattr(head, "bias"):
            head.bias.copy_(head.decoder.bias)  # one of the two is unused when they are not tied
    return model
