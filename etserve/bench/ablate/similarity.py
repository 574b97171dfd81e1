"""Texts beside the baseline's: ROUGE-L and BLEU by the kept libraries, and how much a text repeats itself."""

from collections.abc import Sequence


def rouge_l(texts: Sequence[str], references: Sequence[str]) -> float:
    """Mean F-measure, 0 to 1. Raises ImportError without the extra `bench`."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    pairs = list(zip(texts, references, strict=True))
    found = [scorer.score(reference, text)["rougeL"].fmeasure for text, reference in pairs]
    return float(sum(found) / len(found)) if found else 1.0


def bleu(texts: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU, 0 to 100."""
    from sacrebleu import corpus_bleu

    return float(corpus_bleu(list(texts), [list(references)]).score) if texts else 100.0


def repetition(token_ids: Sequence[Sequence[int]], n: int = 4) -> float:
    """Share of n-grams that occurred before in the same text, over all texts; 0 where all are too short."""
    total = repeated = 0
    for ids in token_ids:
        grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
        total += len(grams)
        repeated += len(grams) - len(set(grams))
    return repeated / total if total else 0.0
