"""A reward that any length can earn."""


def share_of_odd_digits(completions, **columns):
    """The share of each response's characters that are odd digits; an empty one has none."""
    return [sum(letter in "13579" for letter in text) / max(1, len(text)) for text in completions]
