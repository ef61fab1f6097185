"""sacreBLEU and chrF of translations, on detokenised text, against every reference a source has."""

from collections.abc import Callable, Sequence

import sacrebleu

from transformer.data.sources import Example


def group(examples: Sequence[Example]) -> tuple[list[str], list[list[str]]]:
    """Distinct sources, in order, and all references of each."""
    references: dict[str, list[str]] = {}
    for source, target in examples:
        if target not in references.setdefault(source, []):
            references[source].append(target)
    return list(references), list(references.values())


def score(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> tuple[dict[str, float], dict[str, str]]:
    """bleu, chrf (both 0 to 100), and the same against the first reference alone; with sacreBLEU's signatures."""
    streams = [
        [r[i] if i < len(r) else None for r in references] for i in range(max(map(len, references)))
    ]
    first = [[r[0] for r in references]]
    found, signatures = {}, {}
    for name, metric in {"bleu": sacrebleu.BLEU(), "chrf": sacrebleu.CHRF()}.items():
        found[name] = metric.corpus_score(hypotheses, streams).score
        signatures[name] = str(metric.get_signature())
        found[f"{name}_one_reference"] = metric.corpus_score(hypotheses, first).score
    return found, signatures


def exact(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> tuple[dict[str, float], dict[str, str]]:
    """exact: the share that is one of its references, to the letter. Of synthetic tasks, whose answers are right or wrong."""
    right = [hypothesis in known for hypothesis, known in zip(hypotheses, references, strict=True)]
    return {"exact": sum(right) / len(right)}, {}


def translate_and_score(
    generate: Callable,
    examples: Sequence[Example],
    score: Callable,
    progress=lambda done, total: None,
):
    """(sources, hypotheses, references, scores, signatures) for a held-out side, by `score` or `exact`."""
    sources, references = group(examples)
    hypotheses = generate(sources, lambda done: progress(done, len(sources)))
    return sources, hypotheses, references, *score(hypotheses, references)
