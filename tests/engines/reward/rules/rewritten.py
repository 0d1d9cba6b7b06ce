"""References as competition problems write them, and five other ways to write each."""

from __future__ import annotations

import re
from fractions import Fraction

REFERENCES = r"""
\left( 3, \frac{\pi}{2} \right) | p - q | \frac{14}{3} | 9 | \text{Evelyn} | 42 | 90^\circ | 3\sqrt{13} | 6 - 5i
\pi | x=5 | 1,-2 | 52_8 | 11\sqrt2 | \frac{243}{625} | 3, 5, 7 | 1.25 | x^5 - x^4 + x^3 - x^2 + x - 1
-\frac{\pi}{6} | (6,31,-1) | \frac{3\sqrt{3}}{4} | \cot x | 1 \pm \sqrt{19} | \text{east}
\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix} | (a+5)(b+2) | (3,4] | \frac43 | 4210_{5}
\frac{270}7\text{ degrees} | .0000672 | 5x - 7y + 11z + 4 = 0 | (2,\infty) | 10,\!080
\left( \frac{3}{2}, -13 \right) | 11,\! 111,\! 111,\! 100 | \text{(C)} | 288 \pi | \frac 59 | \$32,\!348 | -13x+3
\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix} | 864 \mbox{ inches}^2 | 1\frac{4}{5} | 18+2\pi | 3 \pm 2 \sqrt{2}
\left(\frac{3}{5},\frac{8}{3}\right] | 5.4 \text{ cents} | (-\infty, 0] | \frac{11+9a}{20} | 58,500 | 6r^2-4r-24
(-\sqrt{3}, \sqrt{3}) | (0,9) \cup (9,36) | \frac{20000}{\pi} | x \in [-2,7] | 5r^5 | \{1\pm\sqrt{5},-2\} | 3R^2
.35625 | y = 2x + 3 | \$18.90 | 15\mbox{ cm}^2 | 137 \frac{1}{2} | -5 | 2516_8 | \text{ellipse} | (8,-2)
\left[ \frac{\pi^2}{8}, \frac{5 \pi^2}{4} \right] | -\sqrt{3}
"""


def references() -> list[str]:
    """A sample of MATH-500's answers: all its kinds, as its authors wrote them."""
    return [reference.strip() for line in REFERENCES.strip().splitlines() for reference in line.split("|")]


def rewritten(reference: str) -> list[str]:
    """Five responses with an equivalent answer: marked, unmarked, in other commands, other spacing, another form."""
    return [
        rf"Adding up, the final answer is $\boxed{{{reference}}}$.",
        f"We conclude as follows. The answer is ${reference}$.",
        rf"So we have \[\boxed{{{_in_other_commands(reference)}}}\]",
        rf"Hence \boxed{{ {_in_other_spacing(reference)} }}. This completes the solution.",
        rf"Thus $\boxed{{{_in_another_form(reference)}}}$.",
    ]


def _in_other_commands(text: str) -> str:
    text = re.sub(r"\\d?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))", _tfrac, text)
    text = re.sub(r"\\sqrt(\d)", r"\\sqrt{\1}", text)
    text = text.replace("pmatrix", "bmatrix").replace("\\mbox", "\\text")
    if "\\left" not in text and re.fullmatch(r"[(\[][^()]*[)\]]", text):
        text = rf"\left{text[:-1]}\right{text[-1]}"
    return text


def _tfrac(found: re.Match[str]) -> str:
    top, bottom = found.group(1) or found.group(2), found.group(3) or found.group(4)
    return rf"\tfrac{{{top}}}{{{bottom}}}"


def _in_other_spacing(text: str) -> str:
    if re.fullmatch(r"\\?\$?\d{1,3}(,\\?!?\s*\d{3})+", text):
        return re.sub(r",\\?!?\s*", r"{,}", text)
    if "\\text" in text or "\\mbox" in text:
        return text + "\\,"
    text = re.sub(r"\s*([+=]|\\pm|\\cup|\\in(?![a-z])|\\\\|&)\s*", r"\,\1 ", text)
    text = re.sub(r"\s*,\s*", r",\\; ", text)
    return re.sub(r"(?<=\d)(?=\\pi|\\sqrt)", r"\\, ", text)


def _in_another_form(text: str) -> str:
    for pattern, rewrite in _FORMS:
        found = re.fullmatch(pattern, text)
        if found:
            return rewrite(found)
    return text


_FRACTION = r"(-?)\\[dt]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d+))"


def _as_decimal_or_doubled(found: re.Match[str]) -> str:
    sign, top, bottom = found.group(1), int(found.group(2) or found.group(3)), int(found.group(4) or found.group(5))
    value = Fraction(top, bottom)
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    if rest == 1 and value.denominator <= 1000:
        return f"{sign}{float(value)}"
    return rf"\frac{{{2 * top}}}{{{sign}{2 * bottom}}}"


_FORMS = (
    (_FRACTION, _as_decimal_or_doubled),
    (r"(-?\d+)", lambda found: f"{found.group(1)}.0"),
    (r"(\d*\.\d+)", lambda found: str(Fraction("0" + found.group(1)))),
    (r"(\d{1,3}(?:,(?:\\!)?\s*\d{3})+)", lambda found: re.sub(r"\D", "", found.group(1))),
    (r"\\\$(.*)", lambda found: found.group(1) + r"\text{ dollars}"),
    (r"(\d+)\^\\circ", lambda found: found.group(1) + r"\text{ degrees}"),
    (r"(.*\d)\s*\\(?:text|mbox)\{ .*\}(?:\^2)?", lambda found: found.group(1)),
    (r"(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}", lambda f: rf"\frac{{{int(f[1]) * int(f[3]) + int(f[2])}}}{{{f[3]}}}"),
    (r"\\text\{\(?\s*([^()]*)\)?\}", lambda found: found.group(1)),
    (r"(\d*)\s*\\sqrt\{?(\d+)\}?", lambda found: rf"\sqrt{{{int(found[1] or 1) ** 2 * int(found[2])}}}"),
    (r"(\d+)\s*\\pi", lambda found: rf"\pi \cdot {found.group(1)}"),
    (r"(.*) \\pm (.*)", lambda found: f"{found[1]} - {found[2]}, {found[1]} + {found[2]}"),
    (r"(-?\d+),\s*(-?\d+)", lambda found: f"{found[2]}, {found[1]}"),
    (r"(\d+), (\d+), (\d+)", lambda found: f"{found[3]}, {found[1]} \\text{{ and }} {found[2]}"),
    (r"x\s*=\s*(.*)|x \\in (.*)", lambda found: found[1] or found[2]),
    (r"y = (.*)", lambda found: rf"{found[1]} = y"),
    (r"(\(.*\)) \\cup (\(.*\))", lambda found: rf"{found[2]} \cup {found[1]}"),
    (r"([^\s+,(){}]+)\s*([+-])\s*([^\s+,(){}-]+)", lambda f: f"{'' if f[2] == '+' else '-'}{f[3]} + {f[1]}"),
)  # fmt: skip
