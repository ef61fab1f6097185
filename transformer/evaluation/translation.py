"""BLEU (sacreBLEU) and chrF of detokenized translations, against all references of each source."""

import itertools
from collections.abc import Sequence

import sacrebleu

from transformer.data.sources import Example


def group(examples: Sequence[Example]) -> tuple[list[str], list[list[str]]]:
    """Returns the distinct sources, in order, and the distinct references of each."""
    references: dict[str, list[str]] = {}
    for source, target in examples:
        if target not in references.setdefault(source, []):
            references[source].append(target)
    return list(references), list(references.values())


Scores = tuple[dict[str, float], dict[str, str]]
"""Name -> score, and name -> sacreBLEU's signature."""


def score(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Scores:
    """Returns `bleu` and `chrf`, both from 0 to 100, and their signatures.

    `bleu_one_reference` and `chrf_one_reference` use the first reference alone.
    """
    all_references = list(itertools.zip_longest(*references))
    first_references = [[refs[0] for refs in references]]
    scores, signatures = {}, {}
    for name, metric in {"bleu": sacrebleu.BLEU(), "chrf": sacrebleu.CHRF()}.items():
        scores[name] = metric.corpus_score(hypotheses, all_references).score
        signatures[name] = str(metric.get_signature())
        scores[f"{name}_one_reference"] = metric.corpus_score(hypotheses, first_references).score
    return scores, signatures


def exact(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Scores:
    """Returns `exact`, the share of hypotheses that equal one of their references."""
    right = [text in accepted for text, accepted in zip(hypotheses, references, strict=True)]
    return {"exact": sum(right) / len(right)}, {}
