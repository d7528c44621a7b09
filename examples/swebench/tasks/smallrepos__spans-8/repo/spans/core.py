"""Sets of spans."""


def merge(spans):
    """The same numbers as spans that neither overlap nor touch, in order."""
    merged = []
    for start, end in spans:
        if start > end:
            raise ValueError(f"a span must not end before it starts: {(start, end)}")
        if merged and start <= merged[-1][1]:
            merged[-1] = (min(start, merged[-1][0]), end)
        else:
            merged.append((start, end))
    return merged


def total(spans):
    """How many numbers there are in the spans, each counted once."""
    return sum(end - start for start, end in merge(spans))


def gaps(spans):
    """The spans between the first and the last number that are not covered."""
    merged = merge(spans)
    return [(left[1], right[0]) for left, right in zip(merged, merged[1:], strict=False)]
