"""BLEU by the length of the source."""

import itertools

from transformer.checks import at_least
from transformer.evaluation.evaluators.base import EVALUATORS, Evaluator, Metrics, Snapshot, Subject
from transformer.evaluation.translation import score


@EVALUATORS.register("bleu_by_length")
class BleuByLength(Evaluator):
    """BLEU of translations by the number of words in the source."""

    in_training = False

    words: int = 5  # width of each group of lengths

    def __post_init__(self):
        at_least("train.evaluators", self, 1, "words")

    def why_not(self, task):
        if not task.objective.has_pairs:
            return "requires translations of a source; set data.objective = 'seq2seq'"

    def measure(self, subject: Subject, snapshot: Snapshot) -> Metrics:
        """Yields bleu_by_length/WORDS: BLEU by the length of the source.

        Each group has the sources with WORDS to WORDS + `words` - 1 whitespace-separated words.
        Groups with fewer than ten sources are omitted.
        """
        if snapshot.translations is None:
            return
        group_of = lambda translation: max(len(translation[0].split()) - 1, 0) // self.words
        translations = sorted(zip(*snapshot.translations, strict=True), key=group_of)
        for group_number, members in itertools.groupby(translations, key=group_of):
            _, hypotheses, references = zip(*members, strict=True)
            if len(hypotheses) >= 10:
                shortest = group_number * self.words + 1
                yield f"bleu_by_length/{shortest:03d}", score(hypotheses, references)[0]["bleu"]
