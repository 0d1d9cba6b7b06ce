"""Pairs of an answer and a reference, by class: those that mean the same, and those that don't.

An answer is what a box holds; in the classes of `IN_SENTENCES` it is a whole response.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pairs:
    """One class: `same` and `different` hold (answer, reference)."""

    same: tuple[tuple[str, str], ...]
    different: tuple[tuple[str, str], ...]


def _read(text: str) -> Pairs:
    same, different = [], []
    for line in filter(None, map(str.strip, text.splitlines())):
        sign = " == " if " == " in line else " != "
        answer, reference = line.split(sign)
        (same if sign == " == " else different).append((answer.strip(), reference.strip()))
    return Pairs(tuple(same), tuple(different))


BOXED = {
    "integers and signs": _read(r"""
        42 == 42
        +7 == 7
        {5} == 5
        -3 == -3
        (-3) == -3
        007 == 7
        −5 == -5
        42. == 42
        $42$ == 42
        \$36 == 36
        5 != -5
        42 != 43
        -7 != 7
        12 != 21
        2 3 != 23
        2\ 3 != 23
        2 3 != 5
        1 2 != 12
    """),
    "thousands and decimals": _read(r"""
        10,080 == 10080
        10{,}080 == 10080
        10,\!080 == 10080
        10\,080 == 10080
        11111111100 == 11,\! 111,\! 111,\! 100
        58500 == 58,500
        58,500.00 == 58500
        0.35625 == .35625
        1.250 == 1.25
        0.5 == \frac{1}{2}
        18.9 == \$18.90
        0.\overline{3} == \frac{1}{3}
        0.1\overline{6} == 1/6
        1.25 != 1.26
        .0000671 != .0000672
        0.333 != \frac{1}{3}
        0.333333 != \frac{1}{3}
        1,08 != 108
        58.5 != 58,500
        0.3 != 0.\overline{3}
    """),
    "fractions": _read(r"""
        \frac12 == \frac{1}{2}
        \dfrac{1}{2} == \frac{1}{2}
        \tfrac{17}{50} == \dfrac{17}{50}
        \frac{5}{-7} == -\frac{5}{7}
        \frac{-5}{7} == -\frac{5}{7}
        -5/7 == -\frac{5}{7}
        14/3 == \frac{14}{3}
        \frac{28}{6} == \frac{14}{3}
        0.34 == \frac{17}{50}
        1\frac{4}{5} == \frac{9}{5}
        1 4/5 == 1\frac{4}{5}
        137.5 == 137 \frac{1}{2}
        \frac 59 == \frac{5}{9}
        \frac9{19} == \frac{9}{19}
        \frac{243}{625} == 0.3888
        \frac{5}{7} != -\frac{5}{7}
        \frac{1}{3} != \frac{3}{1}
        3\frac{1}{2} != \frac{3}{2}
        \frac{2}{3} != \frac{3}{2}
        1/0 != 0
        \frac{12}{3} != \frac{1}{23}
        \frac{14}{3} != 14.3
    """),
    "products and arithmetic": _read(r"""
        2*3 == 6
        2\cdot3 == 6
        2 \times 3 == 6
        2×3 == 6
        12/4 == 3
        2+3 == 5
        10 \div 4 == 2.5
        5! == 120
        \binom{5}{2} == 10
        |{-3}| == 3
        3(4) == 12
        4*5 != 45
        2*3 != 23
        2\cdot 3 != 5
        2+3 != 23
        \binom{5}{2} != \frac{5}{2}
        5! != 5
    """),
    "powers and scientific notation": _read(r"""
        2*10^3 == 2000
        2 \times 10^{3} == 2000
        2 \cdot 10^3 == 2000
        3\times 10^8 == 300000000
        6.72 \times 10^{-5} == .0000672
        1e5 == 100000
        1.5e-3 == 0.0015
        2^{10} == 1024
        2^3 == 8
        10^{-2} == 0.01
        5^2 == 25
        x^{10} == x^10
        2*10^3 != 210^3
        6.71\times10^{-8} != 6.72\times10^{-8}
        2 \times 10^3 != 2 \times 10^4
        2\pi 10^{-20} != \pi 10^{-20}
        2^3 != 6
        x^{10} != x^10+x
    """),
    "roots": _read(r"""
        11\sqrt2 == 11\sqrt{2}
        \sqrt{50} == 5\sqrt{2}
        \sqrt{16} == 4
        \frac{1}{\sqrt3} == \frac{\sqrt{3}}{3}
        \frac{\sqrt{2}}{2} == \frac{1}{\sqrt{2}}
        \sqrt{5+2\sqrt{6}} == \sqrt{2}+\sqrt{3}
        2^{1/3} == \sqrt[3]{2}
        √51 == \sqrt{51}
        sqrt(51) == \sqrt{51}
        11 + 11\sqrt{5} == 11 \sqrt{5} + 11
        \sqrt{3}\cdot\sqrt{5} == \sqrt{15}
        3\sqrt{13} == \sqrt{117}
        51 != \sqrt{51}
        2\sqrt[3]{3} != 2\sqrt{3}
        \sqrt{2+3} != \sqrt{2}+\sqrt{3}
        \sqrt{51} != \sqrt{15}
        1.41421356 != \sqrt{2}
        -\sqrt{3} != \sqrt{3}
    """),
    "pi and other constants": _read(r"""
        0.5\pi == \frac{\pi}{2}
        \pi/2 == \frac{\pi}{2}
        \frac12 \pi == \frac{\pi}{2}
        π == \pi
        288\pi == 288 \pi
        2\pi + 18 == 18+2\pi
        \frac{1}{\pi}\cdot 20000 == \frac{20000}{\pi}
        12pi == 12\pi
        e^{2} == e^2
        \ln e == 1
        3.14 != \pi
        3.141593 != \pi
        2\pi != 2
        \frac{\pi}{2} != 90
        \pi^2 != 2\pi
        e != \pi
    """),
    "polynomials and formulas": _read(r"""
        -q+p == p - q
        ab+2a+5b+10 == (a+5)(b+2)
        x^2-1 == (x-1)(x+1)
        1 - x + x^2 - x^3 + x^4 == x^4 - x^3 + x^2 - x + 1
        \frac{11}{20}+\frac{9a}{20} == \frac{11+9a}{20}
        2(k+1) == 2k+2
        6r^2 - 4r - 24 == 2(3r^2-2r-12)
        yx^2 == x^2y
        a/b == \frac{a}{b}
        \frac1a == a^{-1}
        1+8n^2+4n == 8n^2 + 4n + 1
        5r^5 == 5r^{5}
        5(3x-16) == 15x - 80
        0.5x == \frac{x}{2}
        q-p != p - q
        x^2+1 != (x-1)(x+1)
        2k != 2k+2
        3x+2t != 3x+2
        3c != 3
        5r^4 != 5r^5
        x != 2x
        (a+b)^2 != a^2+b^2
        5x != 5
    """),
    "names of variables": _read(r"""
        n == n
        N == N
        3R^2 == 3 R^2
        \alpha == \alpha
        x_1+x_2 == x_2+x_1
        2\theta == \theta+\theta
        \ell+1 == 1+\ell
        2K+K == 3K
        n != N
        N != n
        3r^2 != 3R^2
        2K != 2k
        a != b
        \alpha != \beta
        \Theta != \theta
        x_1 != x_2
        A+b != a+b
        I != i
        2I+I == 3I
    """),
    "complex numbers": _read(r"""
        -5i+6 == 6 - 5i
        9i + 6 == 6+9i
        (1+i)^2 == 2i
        -2+7 i == -2 + 7i
        \frac12+\frac i2 == \frac{1+i}{2}
        i^2 == -1
        1 + 274i == 274i + 1
        (2+i)(2-i) == 5
        6+5i != 6-5i
        1-274i != 1+274i
        2i != 2
        -i != i
        i != 1
    """),
    "sets and lists": _read(r"""
        7,5,3 == 3,5,7
        3, 5, and 7 == 3,5,7
        \{2,1\} == \{1,2\}
        1,2 == \{1,2\}
        -2, 1 == 1,-2
        5\text{ or }6 == 5,6
        x=3 \text{ or } x=4 == 3,4
        6\text{ and }5 == 5,6
        1-\sqrt{19}, 1+\sqrt{19} == 1 \pm \sqrt{19}
        3+2\sqrt{2}, 3-2\sqrt{2} == 3 \pm 2 \sqrt{2}
        -3, 3 == \pm 3
        \{-2,1+\sqrt5,1-\sqrt5\} == \{1\pm\sqrt{5},-2\}
        (3,4),(1,2) == (1,2),(3,4)
        \{\} == \emptyset
        5\text{ or }6 != 56
        3,5 != 3,5,7
        3,5,7 != 7
        1,2,4 != 1,2,3
        3 != \pm 3
        1+\sqrt{19} != 1 \pm \sqrt{19}
        (1,3),(2,4) != (1,2),(3,4)
        \{1,2\} != \{1,2,3\}
        18 \text{ or } 19 != 18
        18, 19 != 19
    """),
    "points and tuples": _read(r"""
        (15, -29) == (15,-29)
        \left(\frac{3}{2},-13\right) == \left( \frac{3}{2}, -13 \right)
        (1.5,-13) == \left( \frac{3}{2}, -13 \right)
        (3,\pi/2) == \left( 3, \frac{\pi}{2} \right)
        (6, 31, -1) == (6,31,-1)
        (-2, 2-1) == (-2,1)
        ( 8 , -2 ) == (8,-2)
        \langle 8,-2 \rangle == (8,-2)
        (\frac{2}{2},2) == (1,2)
        (2,1) != (1,2)
        (6,31,1) != (6,31,-1)
        (31,6,-1) != (6,31,-1)
        \{1,2\} != (1,2)
        (8,-2) != (8,2)
        (1,2,3) != (1,2)
        8 != (8,-2)
    """),
    "intervals and inequalities": _read(r"""
        (3, 4] == (3,4]
        (0.6,\frac{8}{3}] == \left(\frac{3}{5},\frac{8}{3}\right]
        [-2,7] == x \in [-2,7]
        x\in[-2,7] == [-2,7]
        -2 \le x \le 7 == [-2,7]
        (3,\infty)\cup(-\infty,2) == (-\infty, 2) \cup (3, \infty)
        x>5 == (5,\infty)
        (5,∞) == (5,\infty)
        3\le x == x\ge 3
        [3,\infty) == x \geq 3
        x <= 3 == x \le 3
        2<x<5 == (2,5)
        (-\infty,\infty) == \mathbb{R}
        (9,36) \cup (0,9) == (0,9) \cup (9,36)
        (3,4) != (3,4]
        [1,2] != (1,2)
        x>3 != x\ge 3
        (-\infty,2] != (-\infty,2)
        (2,\infty) != (-\infty,2)
        -\infty != \infty
        x<5 != (5,\infty)
    """),
    "matrices": _read(r"""
        \begin{pmatrix}-7\\16\\5\end{pmatrix} == \begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix}
        \begin{bmatrix}-7\\16\\5\end{bmatrix} == \begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix}
        \begin{pmatrix}-1&0\\0&-1\end{pmatrix} == \begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}
        \begin{pmatrix}-\frac13\\\frac23\\\frac53\end{pmatrix} == \begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}
        \frac13\begin{pmatrix}-1\\2\\5\end{pmatrix} == \begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}
        \begin{pmatrix}0.2\\-3.6\end{pmatrix} == \begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}
        \left[\begin{matrix}1&2\\3&4\end{matrix}\right] == \begin{bmatrix}1&2\\3&4\end{bmatrix}
        \begin{pmatrix}-7\\16\\6\end{pmatrix} != \begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix}
        \begin{pmatrix}16\\-7\\5\end{pmatrix} != \begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix}
        \begin{pmatrix}1&3\\2&4\end{pmatrix} != \begin{pmatrix}1&2\\3&4\end{pmatrix}
        \begin{pmatrix}1\\2\end{pmatrix} != \begin{pmatrix}1&2\end{pmatrix}
        \begin{pmatrix}1\\2\end{pmatrix} != 12
    """),
    "equations": _read(r"""
        5 == x=5
        x = 5 == 5
        x=5 == x=5
        2x+3 == y = 2x + 3
        2x+3=y == y = 2x + 3
        y - 2x = 3 == y = 2x + 3
        10x - 14y + 22z + 8 = 0 == 5x - 7y + 11z + 4 = 0
        5x - 7y + 11z = -4 == 5x - 7y + 11z + 4 = 0
        y=-2x == y = -2x
        x=4, x=3 == x=3 \text{ or } x=4
        y=5 != x=5
        x=6 != x=5
        y = 2x - 3 != y = 2x + 3
        y = 2x != y = -2x
        5x - 7y + 11z - 4 = 0 != 5x - 7y + 11z + 4 = 0
    """),
    "functions": _read(r"""
        \frac{\cos x}{\sin x} == \cot x
        (\sin x)^2 == \sin^2 x
        \arctan x == \tan^{-1} x
        \sin^2 x + \cos^2 x == 1
        \log_2 8 == 3
        sin x == \sin x
        \cos(x) == \cos x
        \log_{10} 100 == 2
        \left|x\right| == |x|
        \frac{n(n+1)}{2} == \sum_{k=1}^{n} k
        \tan x != \cot x
        \sin x != \cos x
        \log_2 8 != 28
        \sin 2x != 2\sin x
    """),
    "percentages, degrees, units and money": _read(r"""
        50\% == 50
        50% == 50\%
        50 percent == 50\%
        0.5 == 50\%
        90^\circ == 90
        90 == 90^{\circ}
        90° == 90^\circ
        90 degrees == 90^\circ
        \frac{270}{7} == \frac{270}7\text{ degrees}
        15 == 15\mbox{ cm}^2
        15\text{ cm}^2 == 15
        15 \text{ square centimeters} == 15\mbox{ cm}^2
        864 \text{ square inches} == 864 \mbox{ inches}^2
        18 \text{ apples} == 18
        18 dollars == 18
        \text{18 apples} == 18
        5.4 == 5.4 \text{ cents}
        5\text{ km} == 5 kilometers
        $18.90 == \$18.90
        3\sqrt{2}\text{ cm} == 3\sqrt{2}
        50\% != 0.5\%
        91^\circ != 90^\circ
        5 \text{ km} != 5 \text{ m}
        15 \text{ cm} != 15\mbox{ cm}^2
        3 not != 3
        3\text{ not} != 3
        5 million != 5
        5 dozen != 5
        3 x != 3
        3h != 3
        12 \text{ or so} != 12
        18 dollars != 18.90
    """),
    "numerals of other bases": _read(r"""
        52_8 == 52_8
        52_{8} == 52_8
        4210_5 == 4210_{5}
        2516_{8} == 2516_8
        AB_{16} == AB_{16}
        52_9 != 52_8
        52 != 52_8
        25_8 != 52_8
        42 != 52_8
    """),
    "letters of a choice": _read(r"""
        C == \text{(C)}
        (C) == \text{(C)}
        \text{C} == \text{(C)}
        (C) == C
        C. == C
        \textbf{(C)} == C
        \mathrm{(B)} == \text{(B)}
        (C) 12 == C
        C) 12 == \text{(C)}
        B != \text{(C)}
        (B) != C
        (B) C != C
        12 != \text{(C)}
        AC != C
        A or C != C
        c+1 != C
    """),
    "answers in words": _read(r"""
        Evelyn == \text{Evelyn}
        \text{evelyn} == \text{Evelyn}
        \text{ east} == \text{east}
        even == \text{even}
        \textbf{ellipse} == \text{ellipse}
        \mathrm{Navin} == \text{Navin}
        saturday == Saturday
        Saturday. == Saturday
        No solution == \text{no solution}
        \text{Yes} == yes
        10:30 AM == \text{10:30 AM}
        \text{odd} != \text{even}
        seat != \text{east}
        seat != east
        Sunday != Saturday
        not even != \text{even}
        no != yes
        \text{Evelyn and Navin} != \text{Evelyn}
        3 != \text{three}
        e != \text{east}
    """),
}

IN_SENTENCES = {
    "unmarked formulas": _read(r"""
        The answer is $\frac{1}{2}$. == \frac{1}{2}
        The final answer is \(\sqrt{51}\). == \sqrt{51}
        Therefore \[x = 5.\] == 5
        So we get $$p-q$$ == p - q
        Hence the answer is $3$, $5$ and $7$. == 3,5,7
        Answer: $\begin{pmatrix} -7 \\ 16 \end{pmatrix}$ == \begin{pmatrix}-7\\16\end{pmatrix}
        The answer is $(3,4]$. == (3,4]
        We see that $a=2$ and so the area is $12\pi$. == 12\pi
        The answer is: $\text{Evelyn}$ == \text{Evelyn}
        The answers are $1$ and $-2$. == 1,-2
        Let $x$ be it. Then it is $\sqrt{51}$. != 51
        The answer is $3$ or $4$. != 4
        The answer is $2\pi$. != 2
        The answer is $x^2$ != x
        We have $5$ but the answer is $6$. != 5
    """),
    "unmarked numbers and words": _read(r"""
        The answer is 72. == 72
        The answer is 1,080. == 1080
        Let $x$ be the count. So 3+4 = 7. == 7
        She has -5 left == -5
        a loss of -$5 == -5
        She pays $18 and gets $5 back. == 5
        48/2=24 == 24
        It is 3/4 of it == 0.75
        The answer is Saturday. == Saturday
        The answer is (C). == \text{(C)}
        **Answer: C** == C
        The correct option is (D). == D
        The answer is A or B != A
        so\nEvelyn == Evelyn
        42 == 42
        The answer is 18 dollars. == 18
        no number at all != 18
        The answer is 17, not 18. != 18
        It may be 72 or 73. != 72
        I say 18. The answer is 19. != 18
        The answer is Sunday. != Saturday
        The answer is (B). != \text{(C)}
        The answer is not 18 != 18
    """),
    "marked answers": _read(r"""
        #### 18 == 18
        #### 1,080 == 1080
        #### $1,080.00. == 1,080
        **#### 18** == 18
        #### \boxed{18} == 18
        It is #### 17, no, \boxed{18} == 18
        first \boxed{3} then \boxed{4} == 4
        thus \boxed{\frac{1}{2}}. == 0.5
        so $\boxed{p-q}$ as wanted == p - q
        \boxed{3} and \boxed{5} == 3, 5
        $x = \boxed{5}$ == 5
        cut off \boxed{18 == 18
        \fbox{7} == 7
        Solution: 6*3 = 18\n#### 18 == He has 6*3=<<6*3=18>>18.\n#### 18
        #### 17 != 18
        #### 18\n#### 19 != 18
        \boxed{18} or \boxed{19} != 19
        \boxed{18} or \boxed{19} != 18
        #### 1 2 3 18 != 18
        \boxed{} != 18
        #### != 18
        \boxed{3, 5, 7} != 7
    """),
}
