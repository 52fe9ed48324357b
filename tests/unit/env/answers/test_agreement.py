"""Answers that must agree with a row's answer, and answers that must not, over the notations of numbers and LaTeX."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill_env.answers.comparison import canonical_answer
from gristmill_env.rewards.accuracy import accuracy

pytestmark = pytest.mark.slow

TABLE: list[tuple[str, list[str], list[str]]] = [
    (
        "5",
        [r"5\text{ cm}", r"5\text{ points}", "5 points", "5 point", "5 seconds", r"5\text{ square units}"],
        [
            r"5\text{ squared}",
            r"5\text{ or more}",
            r"5\text{ factorial}",
            r"5\text{ thirds}",
            r"5\text{ times ten}",
            r"5\text{ minus two}",
            r"5\text{ over six}",
            r"5\text{ or seventy-three}",
            r"5\text{ plus or minus ten}",
            "5 sevenths",
            "5 ninths",
            "5 twelfths",
            "5 twentieths",
            "5 below zero",
            "5 remainder two",
            "5 through ten",
            "5 quadrillion",
            "5 lakh",
            "5 crore",
            "5 gross",
            "5 point five",
        ],
    ),
    (
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
        [
            r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
            r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \\ \end{pmatrix}",
            "\\begin{pmatrix}\n1 & 2 \\\\\n3 & 4\n\\end{pmatrix}",
            r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}",
            r"\left[\begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array}\right]",
            r"\left(\begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array}\right)",
            r"\begin{pmatrix} 1 & 2 \\[2pt] 3 & 4 \end{pmatrix}",
            r"\begin{pmatrix} 1 & 2 \\ [2pt] 3 & 4 \end{pmatrix}",
            r"\left(\begin{smallmatrix} 1 & 2 \\ 3 & 4 \end{smallmatrix}\right)",
            r"\begin{pmatrix} 1 & 2 \\\, 3 & 4 \end{pmatrix}",
            r"\begin{pmatrix} 1 & \frac{4}{2} \\ 3 & 4 \end{pmatrix}",
            r"\begin{pmatrix} 1 & 2 \cr 3 & 4 \end{pmatrix}",
            r"\begin{pmatrix} 1 & 2 \\ 3 & 2^2 \end{pmatrix}",
            r"\begin{pmatrix} 1.0 & 2 \\ 3 & 4 \end{pmatrix}",
            r"A = \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
            r"\begin{pmatrix} 1 & 2 \\* 3 & 4 \end{pmatrix}",
            r"\begin{matrix} 1 & 2 \\ 3 & 4 \end{matrix}",
        ],
        [
            r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}",
            r"\begin{pmatrix} 1 & 2 & 3 & 4 \end{pmatrix}",
            r"\begin{pmatrix} 1 \\ 2 \\ 3 \\ 4 \end{pmatrix}",
            r"\begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}",
            "-2",
            r"\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}",
            r"\begin{pmatrix} 2 & 1 \\ 3 & 4 \end{pmatrix}",
            r"\begin{pmatrix} 3 & 4 \\ 1 & 2 \end{pmatrix}",
            r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \\ 0 & 0\end{pmatrix}",
            "(1,2,3,4)",
            r"\{1,2,3,4\}",
            r"\begin{pmatrix} -1 & 2 \\ 3 & 4 \end{pmatrix}",
            r"\begin{pmatrix} 1 & 2 \\ 3 & 4",
            r"2\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
            r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}^2",
            r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}^T",
            r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}^{-1}",
            r"\begin{pmatrix} 12 \\ 34 \end{pmatrix}",
            "24",
            "1234",
            r"\begin{pmatrix} 1 & 2 \\ 3 \end{pmatrix}",
        ],
    ),
    (
        r"\begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix}",
        [
            r"\begin{pmatrix}-7\\16\\5\end{pmatrix}",
            "\\begin{pmatrix}\n-7 \\\\\n16 \\\\\n5\n\\end{pmatrix}",
            r"\begin{bmatrix} -7 \\ 16 \\ 5 \end{bmatrix}",
            r"\begin{pmatrix} -7 \\[4pt] 16 \\[4pt] 5 \end{pmatrix}",
            r"\begin{pmatrix} -7\\\ 16\\\ 5 \end{pmatrix}",
        ],
        [
            r"\begin{pmatrix} 16 \\ -7 \\ 5 \end{pmatrix}",
            r"\begin{pmatrix} -7 & 16 & 5 \end{pmatrix}",
            r"\begin{pmatrix} 7 \\ 16 \\ 5 \end{pmatrix}",
            r"\begin{pmatrix} 5 \\ 16 \\ -7 \end{pmatrix}",
            "-560",
            "14",
        ],
    ),
    (
        r"\begin{pmatrix} 2 \\ 3 \end{pmatrix}",
        [r"\begin{pmatrix}2\\3\end{pmatrix}"],
        [
            r"\begin{pmatrix} 3 \\ 2 \end{pmatrix}",
            "6",
            r"\begin{pmatrix} 2 & 3 \end{pmatrix}",
            "23",
            r"\frac23",
            r"\begin{pmatrix} 6 \end{pmatrix}",
        ],
    ),
    (r"\begin{pmatrix} 4 \\ 2 \\ 1 \end{pmatrix}", [], [r"\begin{pmatrix} 1 \\ 2 \\ 4 \end{pmatrix}", "8"]),
    (
        r"\begin{pmatrix} 0 & 3 \\ 0 & 0 \end{pmatrix}",
        [r"\begin{pmatrix} 0 & 3\\0 & 0 \end{pmatrix}"],
        [
            r"\begin{pmatrix} 0 & 0 & 0 \end{pmatrix}",
            "0",
            r"\mathbf{0}",
            r"\begin{pmatrix} 0 & 0 \\ 3 & 0 \end{pmatrix}",
            r"\begin{pmatrix} 0 & 0 \\ 0 & 0 \end{pmatrix}",
        ],
    ),
    (
        r"\begin{pmatrix} 0 & 0 \\ 0 & 0 \end{pmatrix}",
        [r"\begin{pmatrix}0&0\\0&0\end{pmatrix}"],
        [
            "0",
            r"\begin{pmatrix} 0 & 0 & 0 & 0 \end{pmatrix}",
            r"\begin{pmatrix} 0 & 0 & 0 \\ 0 & 0 & 0 \\ 0 & 0 & 0 \end{pmatrix}",
        ],
    ),
    (
        r"\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}",
        [],
        [
            "1",
            "I",
            r"\begin{pmatrix} 1 & 0 & 0 \\ 0 & 1 & 0\\ 0&0&1 \end{pmatrix}",
            r"\begin{pmatrix} 0 & 1 \\ 1 & 0 \end{pmatrix}",
        ],
    ),
    (
        r"\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}",
        [
            r"\begin{pmatrix} -\frac13 \\ \frac23 \\ \frac53 \end{pmatrix}",
            r"\frac13\begin{pmatrix} -1 \\ 2 \\ 5 \end{pmatrix}",
        ],
        [r"\begin{pmatrix} \frac13 \\ \frac23 \\ \frac53 \end{pmatrix}"],
    ),
    (
        r"\begin{pmatrix} \cos t & -\sin t \\ \sin t & \cos t \end{pmatrix}",
        [r"\begin{pmatrix}\cos t&-\sin t\\\sin t&\cos t\end{pmatrix}"],
        [r"\begin{pmatrix} \cos t & \sin t \\ -\sin t & \cos t \end{pmatrix}"],
    ),
    (r"\begin{pmatrix} x \\ y \end{pmatrix}", [], [r"\begin{pmatrix} y \\ x \end{pmatrix}", "xy"]),
    (
        r"\begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}",
        [r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"],
        [r"\begin{vmatrix} 1 & 2 \\ 4 & 3 \end{vmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"],
    ),
    (
        r"\left[\begin{array}{ccc} 1 & 2 & 3 \\ 4 & 5 & 6 \end{array}\right]",
        [
            r"\begin{bmatrix} 1 & 2 & 3 \\ 4 & 5 & 6 \end{bmatrix}",
            r"\left[\begin{array}{rrr} 1 & 2 & 3 \\ 4 & 5 & 6 \end{array}\right]",
            r"\left[\begin{array}{c c c} 1 & 2 & 3 \\ 4 & 5 & 6 \end{array}\right]",
        ],
        [
            r"\begin{bmatrix} 1 & 4 \\ 2 & 5 \\ 3 & 6 \end{bmatrix}",
            r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \\ 5 & 6 \end{bmatrix}",
            r"\left[\begin{array}{cc|c} 1 & 2 & 3 \\ 4 & 5 & 7 \end{array}\right]",
        ],
    ),
    (
        r"\begin{cases} x=1 \\ y=2 \end{cases}",
        [r"\begin{cases}x=1\\y=2\end{cases}", "\\begin{cases}\nx=1 \\\\\ny=2\n\\end{cases}"],
        [
            r"\begin{cases} x=2 \\ y=1 \end{cases}",
            "2",
            "x=1",
            "x=2",
            r"\begin{cases} x=1 \\ y=3 \end{cases}",
            r"\begin{cases} x=1 \\ z=2 \end{cases}",
            "3",
        ],
    ),
    (
        r"\begin{aligned} x&=1 \\ y&=2 \end{aligned}",
        [r"\begin{aligned}x&=1\\y&=2\end{aligned}"],
        [r"\begin{aligned} x&=2 \\ y&=1 \end{aligned}", "x=1", "2"],
    ),
    (
        r"\begin{cases} x & x > 0 \\ -x & x \le 0 \end{cases}",
        [r"\begin{cases}x&x>0\\-x&x\le0\end{cases}"],
        [r"\begin{cases} -x & x > 0 \\ x & x \le 0 \end{cases}", "x"],
    ),
    (
        "2516_8",
        ["2516_{8}", "2516_{ 8 }", "2{,}516_8", r"2516_{\text{8}}", r"2516_{\text{eight}}", "(2516)_8", "2516_{(8)}"],
        ["2516_7", "2516_9", "2516_{10}", "2517_8", "25168", "2516_{80}", "2516_x", "2516 7"],
    ),
    ("101_2", ["101_{2}"], ["101_3", "101_{10}", "110_2", "1012"]),
    ("1A_{16}", ["1A_{16}"], ["1A_{12}", "1B_{16}", "1A16"]),
    ("1357", [], ["1357_9", "1357_{8}", "2516_9"]),
    ("5", ["5"], ["101_3", "5_{x}"]),
    ("0x1F", ["0x1F", "0x1f"], ["0x2F", "0x1E", "1F", "0"]),
    ("0b101", ["0b101"], ["0b110", "101"]),
    ("1024", ["2^{10}", "2^10", "2**10", "32^2", "4^5"], ["2^{11}", "2^1 0", "10^2", "210", "2^{-10}", "2^{1}0"]),
    ("2^{10}", ["1024", "4^5"], ["10^{2}", "20", "2^{100}", "1023"]),
    ("120", ["5!", "5 !"], ["6!", "5!!", "5", "120!"]),
    ("5!", ["120", r"5 \cdot 4!"], ["5", "24", "60", "5!!"]),
    ("72", [], ["72!", "72^2", "72^{0}", "7.2", "7 2", "72/1000"]),
    (
        "1000",
        [
            "1e3",
            r"1\times10^{3}",
            r"1 \times 10^3",
            r"1 \cdot 10^3",
            "10^3",
            "1{,}000",
            "1,000",
            r"1\,000",
            "1E3",
            "1.0e3",
            "1e+3",
            "10^{3}",
            r"10 \times 10^2",
            "1 × 10³",
            "１０００",
        ],
        [
            "1e2",
            "1e4",
            r"1\times10^{2}",
            "10^2",
            "10000",
            "1.000e2",
            "1,00",
            "1,0000",
            "1e33",
            "1e-3",
            r"1\times10^{-3}",
            "1 e3",
        ],
    ),
    (
        r"6.02\times10^{23}",
        [
            "6.02e23",
            r"6.02 \times 10^{23}",
            r"6.02\cdot10^{23}",
            "602000000000000000000000",
            r"60.2\times10^{22}",
            "6.02E23",
        ],
        [
            r"6.02\times10^{22}",
            "6.02",
            r"6.03\times10^{23}",
            "6.02e22",
            r"6.02\times10^{-23}",
            r"6.02 \times 1023",
            "6.02e-23",
        ],
    ),
    (
        r"1.6\times10^{-19}",
        ["1.6e-19", r"16\times10^{-20}", "0.00000000000000000016"],
        [
            "0",
            "1.6e-18",
            "1.7e-19",
            "0.0000000000000000001",
            "1.6e19",
            "1.5e-19",
            r"1.7\times10^{-19}",
            "0.00000000000000000015",
        ],
    ),
    (
        "0",
        ["0.0", "-0", "0.00", "+0", "−0", "0%", r"\frac{0}{5}"],
        [
            "1e-10",
            "0.0000001",
            "1e-20",
            "10^{-20}",
            r"\frac{1}{10000000}",
            "1/1000000000",
            "-0.1",
            r"\infty",
            r"\frac{0}{0}",
            r"\emptyset",
            r"1.6\times10^{-19}",
        ],
    ),
    (
        "0.0000001",
        ["1e-7", "10^{-7}", r"1\times 10^{-7}"],
        ["0", "0.0000002", "1e-8", "10^{-8}", r"\frac{1}{20000000}"],
    ),
    ("10^{100}", ["10^{100}", r"1\times10^{100}", "1e100"], ["10^{101}", "10^{99}", "1e99", "10100", "1e101"]),
    (
        "123456789012345678901234567890",
        ["123456789012345678901234567890", "123{,}456{,}789{,}012{,}345{,}678{,}901{,}234{,}567{,}890"],
        [
            "123456789012345678901234567891",
            "123456789012345678901234567000",
            r"1.2345678901234567\times10^{29}",
            r"1.23456789\times10^{29}",
        ],
    ),
    ("3.14159265358979323846", [], ["3.14"]),
    (r"\pi", ["π", r"\pi", "pi"], ["3.14", "3.14159", r"\frac{22}{7}", r"\pi^2", "p", r"2\pi", "p i"]),
    (
        "25%",
        [r"25\%", "25 %", "25 percent", "0.25", "25", r"\frac14", "1/4", "25.0%"],
        ["26%", "2.5%", "0.025", "250%", "2500%", "0.0025", "0.25%"],
    ),
    (
        "0.5",
        ["50%", r"50\%", ".5", "0.50", r"\frac{1}{2}", "1/2", "½", "0.5000"],
        ["0.5%", "5%", "5", "0.05", "0.51", "500%", "1/20"],
    ),
    (
        r"\$12.50",
        ["12.5", "12.50", "$12.50", r"\$12.5", "12.50 dollars", r"12.50\text{ dollars}"],
        ["1250", "12.05", r"\$125", "12", "12,50", "-12.5"],
    ),
    (
        "1,234",
        ["1234", "1{,}234", r"1\,234", r"1,\!234", "1234.0", "１２３４"],
        ["1.234", "12.34", "1,235", "234", "1, 234", "(1,234)", "1;234", "12,34"],
    ),
    ("1234", ["1,234", "1{,}234", r"1\,234", "$1{,}234$"], ["1.234", "123,4", "1,2,3,4", "1+234", r"1\cdot234"]),
    ("1 234", [], ["235", "234", "1", "1+234"]),
    (
        r"3\frac{1}{2}",
        ["3.5", r"\frac{7}{2}", "7/2", "3 1/2", "3½", r"3\tfrac12", r"3 \frac{1}{2}"],
        ["1.5", r"\frac{3}{2}", r"3\cdot\frac{1}{2}", r"\frac{31}{2}", "3/2", "31/2", "4", "-3.5", "2.5"],
    ),
    ("7/2", ["3 1/2", r"3\frac12", r"3 \dfrac{1}{2}"], [r"\frac27", r"2\frac12", "3.05"]),
    (r"-3\frac12", ["-3.5", r"-\frac72"], ["-2.5", "3.5", r"-\frac32"]),
    (
        r"0.\overline{3}",
        [r"\frac{1}{3}", r"0.\overline{3}", r"0.\bar{3}", r"0.\overline{33}", r"0.3\overline{3}"],
        [
            "0.3",
            r"0.\overline{4}",
            r".0\overline{3}",
            r"0\overline{3}",
            "3",
            r"\frac{3}{10}",
            "0.33",
            r"0.\overline{03}",
        ],
    ),
    (
        r"\frac{1}{3}",
        [r"0.\overline{3}", r"\dfrac13", "1/3", r"\frac{2}{6}", "0.333333"],
        ["0.3", "0.33", r"\frac{1}{30}", "3", "0.333334", r"0.\overline{34}"],
    ),
    (r"1.\overline{27}", [r"\frac{14}{11}"], ["1.27", r"1.\overline{72}"]),
    (r"0.1\overline{6}", [r"\frac16"], ["0.16", r"0.\overline{16}"]),
    (
        r"\frac{3}{4}",
        [
            r"\dfrac{3}{4}",
            r"\tfrac34",
            r"\frac34",
            "3/4",
            "0.75",
            "75%",
            r"\frac{6}{8}",
            r"\frac{-3}{-4}",
            r"{3 \over 4}",
            r"3 \div 4",
            r"\cfrac{3}{4}",
            "¾",
            r"\left(\frac{3}{4}\right)",
            r"\frac{3}{4}.",
            r"\frac 3 4",
            r"\frac{3} {4}",
            "6/8",
        ],
        [
            r"\frac{4}{3}",
            "34",
            "3.4",
            r"-\frac34",
            "3,4",
            r"\frac{3}{40}",
            r"\frac{30}{4}",
            "(3,4)",
            "3-4",
            r"\binom{3}{4}",
        ],
    ),
    (
        r"-\frac{3}{4}",
        [r"\frac{-3}{4}", r"\frac{3}{-4}", "-3/4", "-0.75", "−3/4", "–3/4"],
        [r"\frac34", r"\frac{-3}{-4}", "3/4"],
    ),
    (r"\frac{x}{y}", ["x/y", r"\frac{2x}{2y}", "x y^{-1}"], [r"\frac{y}{x}", "xy", "x-y"]),
    (
        r"\sqrt{2}",
        [r"\sqrt2", "√2", "sqrt(2)", "2^{1/2}", r"2^{\frac12}", r"\frac{2}{\sqrt2}"],
        [r"\sqrt[3]{2}", "1.414", "1.4142", r"-\sqrt2", r"\pm\sqrt2", r"2\sqrt2", r"\sqrt{20}", r"\sqrt{2}i", "2"],
    ),
    (r"\sqrt[3]{16}", [r"2\sqrt[3]{2}", "16^{1/3}"], [r"\sqrt{16}", "4", r"\sqrt[4]{16}", "2", r"3\sqrt{16}"]),
    (
        r"2+\sqrt{3}",
        [r"\sqrt3+2", r"\frac{1}{2-\sqrt3}", r"\sqrt{7+4\sqrt3}"],
        [r"2-\sqrt3", r"2\sqrt3", r"3+\sqrt2", "3.732"],
    ),
    (r"\pm 5", [r"\pm5", "±5", "5, -5", r"\{-5,5\}"], ["5", "-5", r"\pm 6", "5,6", r"\mp 6"]),
    (
        r"2 \pm \sqrt{3}",
        [r"2\pm\sqrt3", r"2+\sqrt3, 2-\sqrt3"],
        [r"2+\sqrt3", r"2-\sqrt3", r"3\pm\sqrt2", r"-2\pm\sqrt3"],
    ),
    ("5", [], [r"\pm 5", "5,-5", r"\{5,-5\}", "|5", "5i", "5x", r"5^\circ x", r"5\%x"]),
    (
        "[0, 1)",
        ["[0,1)", r"\left[0,1\right)", r"x \in [0,1)"],
        ["[0,1]", "(0,1)", "(0,1]", "[0,10)", r"\{0,1\}", "0 < x < 1", "[1,0)", "[0,1", "0,1"],
    ),
    (
        "(0, 1)",
        ["(0,1)", r"\left(0,1\right)", "(0.0, 1)"],
        ["[0,1]", "(1,0)", "[0,1)", "(0,1]", r"\{0,1\}", "0.1", "(0,1,1)", "0,1", "(0,-1)", "01"],
    ),
    (
        r"(-\infty, 3]",
        [r"(-\infty,3]", "(-∞, 3]"],
        [r"(-\infty,3)", r"[3,\infty)", "x<3", r"x \ge 3", r"(\infty,3]", "3"],
    ),
    (
        r"(-\infty,1)\cup(2,\infty)",
        [r"(2,\infty)\cup(-\infty,1)", r"(-\infty, 1) \cup (2, \infty)"],
        [
            r"(-\infty,1]\cup(2,\infty)",
            "(1,2)",
            r"(-\infty,1)\cap(2,\infty)",
            r"(-\infty,2)\cup(1,\infty)",
            r"(-\infty,1)",
        ],
    ),
    ("x > 5", ["5 < x", "x>5", r"(5,\infty)"], ["x<5", r"x \ge 5", "5", "x=5", r"(-\infty,5)", "y > 5", "x > 6"]),
    (r"x \ne 2", [r"x \neq 2", "x ≠ 2"], ["x=2", "2", r"x \ne 3", "x>2"]),
    (
        r"\{1,2,3\}",
        [r"\{3,2,1\}", r"\{1, 2, 3\}", r"\left\{1,2,3\right\}", "1,2,3", r"\{1,2,2,3\}"],
        [r"\{1,2\}", r"\{1,2,3,4\}", "6", "(1,2,4)", r"\{1,2,4\}", "123", r"\{1,23\}", r"\{\{1,2\},3\}"],
    ),
    (
        "(1,2)",
        ["(1, 2)", r"\left(1,2\right)", r"\left( 1 , 2 \right)", "(1.0,2)"],
        ["(2,1)", "(1,2,3)", r"\{1,2\}", "1.2", "12", "(1,-2)", "[1,2]", "(1,2),(3,4)", "(1)(2)"],
    ),
    (
        "(1,2),(3,4)",
        ["(3,4),(1,2)", "(1, 2), (3, 4)", r"\{(1,2),(3,4)\}"],
        ["(1,2)", "(2,1),(3,4)", "(1,3),(2,4)", "(1,2,3,4)", "(1,2),(4,3)", "1,2,3,4"],
    ),
    (
        "1, 2, 3",
        ["1,2,3", "3, 2, 1", r"1, 2 \text{ and } 3", "1, 2, and 3", r"\{1,2,3\}", "1;2;3"],
        ["1,2", "1,2,3,4", "1,2,4", "6", "123", "1.23"],
    ),
    (
        "3, 5",
        ["5, 3", "3 and 5", r"3 \text{ and } 5", "x=3, x=5", "x=3 or x=5", r"x = 3 \text{ or } x = 5"],
        ["3", "5", "3.5", "35", "3,6", "8", "15", "(3,5,7)"],
    ),
    (r"\emptyset", [r"\varnothing", "∅", r"\{\}"], ["0", r"\{0\}", "1", r"\{\emptyset\}"]),
    (
        r"90^\circ",
        ["90", r"90^{\circ}", "90°", "90 degrees", r"90\text{ degrees}"],
        ["9", "900", r"90\pi", r"\frac{\pi}{2}x", "-90", "0"],
    ),
    (
        r"5\text{ cm}",
        ["5", "5 cm", r"5\,\text{cm}", r"5\mathrm{cm}", "5.0 cm"],
        ["6 cm", "0.5", "50", r"5\text{ million}"],
    ),
    (r"12\text{ cm}^2", ["12", r"12\,\mathrm{cm}^2", "12 cm²"], ["144", "12^2", "24"]),
    (
        "20",
        [
            "20 m/s",
            r"20\text{ m/s}",
            "20 m",
            "20 km/h",
            r"20 \frac{m}{s}",
            "20 m s^{-1}",
            r"20\,\mathrm{m\,s^{-1}}",
            "20 g/L",
        ],
        ["20m", "20s", "20t", "20 t", "20 x/y", "20 m/x", "20 d", "21 m/s"],
    ),
    ("20 m/s", ["20", "20 km/h", r"20\text{ m/s}"], ["21 m/s", "2", "20x"]),
    (r"5 kg \cdot m/s^2", ["5", r"5 \text{ kg m/s}^2"], ["6", "5x"]),
    (
        r"2\sqrt{3}\text{ cm}",
        [r"2\sqrt{3}", r"2\sqrt3 cm", r"\sqrt{12}\text{ cm}^2"],
        [r"2\sqrt{3}c", r"3\sqrt2\text{ cm}"],
    ),
    ("2h", ["2 h", "h+h"], ["2", "2s", "2t", "h", "3h"]),
    (
        "2",
        [r"2\text{ m}", r"2\mathrm{m}", r"2\text{ N}", r"2\,\mathrm{V}", r"2\text{ N m}", r"2\text{ kHz}"],
        [r"2\mathrm{x}", r"2\text{x}", r"2x\mathrm{y}"],
    ),
    ("n", [], [r"n\text{ is even}", r"n\text{ for all }m"]),
    ("5t", ["5 t"], ["5", "5s", "5l", "t"]),
    ("3x+2t", ["2t+3x"], ["3x+2", "3x+2s", "3x+2m"]),
    ("x = 2t", ["2t"], ["x = 2", "2"]),
    (r"\frac{\sqrt3}{4} s^2", [r"\frac{\sqrt{3}}{4}s^2"], [r"\frac{\sqrt3}{4}", r"\frac{\sqrt3}{4}s"]),
    (r"2\pi s", [], [r"2\pi", r"2\pi h"]),
    ("x > 2t", [], ["x > 2", "x > 2s"]),
    (
        "x > 2",
        ["2 < x", r"(2,\infty)"],
        [r"x \not> 2", r"x \ngtr 2", r"x \gg 2", "x > 2 or x = 1", "x > 2, y > 3", r"x \ge 2"],
    ),
    (r"x \ne 2", [], [r"x \not= 3", "x = 2"]),
    ("A^T", ["A^{T}", r"A^\top", r"A^{\mathrm{T}}"], ["A", "A^2", "B^T"]),
    (r"A^T B", [r"A^{T}B"], ["AB", "A B^T", "A^T B^T"]),
    ("105", ["7!!", "7 !!"], ["7!", "8!!", "7!!!", "(7!)!"]),
    ("-7!!", ["-105"], ["105", "-7!"]),
    ("(2n-1)!!", [], ["(2n-1)!", "2n-1"]),
    ("5", ["5 apples", r"5\text{ m/s}", "5 km"], ["5 dozen", "5 thousand", "5k", "5 or 6", "not 5", "5x", "5, 6"]),
    (r"\log 2", [r"\log 2", r"\log(2)"], [r"\log 3", r"\ln 2", r"\log_2 2", "2", r"\log_{10} 3"]),
    (r"\ln 2", [r"\ln(2)", r"\ln{2}", r"\frac12\ln 4"], [r"\ln 3", r"\log_{10} 2", "0.69", "2"]),
    (
        r"\log_2 3",
        [r"\log_{2} 3", r"\log_2(3)", r"\frac{\ln 3}{\ln 2}"],
        [r"\log_3 2", r"\log 3", r"\log_2 4", "3", "2", r"\log_{23}"],
    ),
    (r"\log_{10} 5", [r"\log_{10}(5)"], [r"\log_5 10", r"\log_{10} 6", r"\log_{2} 5"]),
    (r"\sin 30^\circ", [], [r"\cos 30^\circ", r"\sin 60^\circ"]),
    (
        r"\sin x",
        [r"\sin(x)", "sin x", r"\sin{x}"],
        [r"\cos x", r"\sin 2x", r"\sin y", "x", r"\sin^2 x", r"\sin^{-1} x", r"\arcsin x"],
    ),
    (
        r"\frac{\pi}{6}",
        [r"\pi/6", r"\frac16\pi", "π/6", r"\arcsin\frac12"],
        [r"\frac{\pi}{3}", r"\frac{6}{\pi}", "30", r"\frac{\pi}{60}"],
    ),
    ("3+4i", ["4i+3", "3 + 4i", "3+i4"], ["3-4i", "4+3i", "7", "7i", "3+4", "5", "-3+4i", "3i+4"]),
    ("2i", ["i2"], ["2", "-2i", "i^2", "2+i", "2x"]),
    (r"e^{i\pi}", [], ["1", "e", r"e^{\pi}"]),
    (r"\infty", ["∞", r"+\infty", "infinity"], [r"-\infty", "0", "1", "8", "10^{99}"]),
    (r"-\infty", ["-∞"], [r"\infty", "0"]),
    ("i", ["i"], ["1", "-i", "j", "I", "-1"]),
    (
        "x^2+2x+1",
        ["(x+1)^2", "1+2x+x^2", "x^2 + 2x + 1", "x*x+2*x+1"],
        ["x^2+2x", "x^2-2x+1", "(x-1)^2", "x^2+2x+2", "y^2+2y+1", "x2+2x+1", "X^2+2X+1", "x^{2+2x+1}"],
    ),
    ("y = 2x + 3", ["2x+3", "y=3+2x", "y = 2x+3", "y-2x=3"], ["y=3x+2", "y=2x-3", "x=2y+3", "y=2x", "y = 2x + 3z"]),
    ("x = 5", ["5", "x=5", "x = 5.0"], ["x=6", "y=5", "x=-5", "x>5", r"x \ne 5"]),
    ("x", [], ["y", "2x", "x^2", "1", "-x", "x_1"]),
    ("x_1", ["x_{1}"], ["x_2", "x", "x1", "1"]),
    ("abc", ["abc"], ["ab", "abd", "a+b+c", "abcd"]),
    ("2^x", [], ["x^2", "2x", "2^y", "2^{x+1}"]),
    ("|x|", [r"\left|x\right|", r"\lvert x \rvert"], ["x", "-x", "1"]),
    (r"\lfloor x \rfloor", [], ["x", r"\lceil x \rceil"]),
    (
        r"\binom{5}{2}",
        ["10", r"\dbinom{5}{2}", r"\binom52", r"{5 \choose 2}"],
        ["5/2", "2.5", r"\binom{2}{5}", "52", r"\frac{5}{2}", r"\begin{pmatrix} 5 \\ 2 \end{pmatrix}"],
    ),
    ("2:3", ["2:3"], ["3:2", "2/30", "23", "6"]),
    ("3:45", ["3:45"], ["3:54", "345", "45:3", "15", "135"]),
    ("10:30", ["10:30"], ["10:31", "30:10", "300"]),
    (
        r"\text{Friday}",
        ["Friday", r"\text{friday}", r"\textbf{Friday}", r"\mathrm{Friday}", r"\text{ Friday }"],
        ["Monday", r"\text{Monday}", r"\text{day}", "5", "Frida", "yadirF"],
    ),
    (r"\text{even}", ["even", r"\text{Even}"], ["odd", "neve", r"\text{seven}"]),
    (r"\text{(B)}", ["B", "(B)", r"\textbf{(B)}", r"\text{B}", r"\mathrm{(B)}"], ["A", "(C)", "8", r"\text{AB}"]),
    ("B", ["B", r"\text{B}", "(B)"], ["C", "b+1", r"\text{C}", "A"]),
    (r"\text{Evelyn}", ["Evelyn", r"\text{Evelyn}"], ["Eveline", "Carla", "nylevE"]),
    (r"\text{café}", ["café", "cafe\u0301", "\\text{cafe\u0301}"], ["cafe", "cafés"]),
    (r"\text{x = 5}", [], ["x = 6"]),
    ("72", ["７２", "７２．", "7２", r"\text{72}", "072", "72."], ["７３", "٧٢x", "27", "²72"]),
    ("-5", ["−5", "–5", "－５", "﹣5", "- 5", "-5", "-5.0"], ["5", "+5", "--5", "—6", "5-", "-15"]),
    (
        "12",
        [r"3\cdot4", "3*4", r"3\times4", "6+6", r"\frac{24}{2}"],
        ["34", "3 4", "3,4", "3-4", "21", "1 2", "12i", "12'"],
    ),
    (r"\text{True}", ["True", "true"], ["False", "1"]),
    ("f(x)=x^2", ["x^2", "f(x) = x^2"], ["x^3", "f(x)=2x", "g(x)=x^3"]),
    ("2x-1=0", [], ["2x+1=0", "2x=0"]),
    ("4x^2 - y^2 = 1", ["4x^2-y^2-1=0"], ["4x^2+y^2=1", "y^2-4x^2=1"]),
    ("a_n = 2^n", ["2^n"], ["n^2", "2n", "a_n=3^n"]),
    ("12!", ["479001600"], ["12", "479001601", "11!"]),
    ("x^{10}", ["x^{10}"], ["x^{11}", "10x", "x10"]),
    (
        r"\frac{1}{2}, \frac{1}{3}",
        [r"\frac13,\frac12", "0.5, 1/3"],
        [r"\frac12", r"\frac{1}{2}, \frac{1}{4}", r"\frac56"],
    ),
    ("0.1", [r"\frac{1}{10}", "0.10", "10%"], ["0.11", "0.01", "0.099999999", r"\frac{1}{11}"]),
    ("3.5", [r"\frac72"], ["35", "3,5", "3.05"]),
    ("x⁻¹", ["1/x", "x^{-1}"], ["x", "x-1"]),
    ("2¹⁰", ["1024"], ["20", "210", "2^1"]),
    ("⅝", ["5/8", "0.625"], ["8/5", "58"]),
    (r"\mathbb R", [r"\mathbb{R}"], [r"\mathbb{Q}", "R"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("gold", "equal", "different"), TABLE, ids=[gold for gold, _, _ in TABLE])
async def test_accuracy_accepts_equal_answers_and_no_different_answer(
    gold: str, equal: list[str], different: list[str]
) -> None:
    assert [text for text in equal if await accuracy(rf"\boxed{{{text}}}", gold) != 1.0] == []
    for options in ({}, {"extract": "anywhere"}, {"last_number": True}):
        assert [text for text in different if await accuracy(rf"\boxed{{{text}}}", gold, **options) == 1.0] == []


MISREAD: list[tuple[str, list[str], list[str]]] = [
    (
        "1:2:3",
        ["1:2:3", "1 : 2 : 3", r"1 \colon 2 \colon 3", "a:b:c = 1:2:3"],
        ["1:3:2", "3:2:1", "2:1:3", "1/6", "1:2", "1,2,3", "123"],
    ),
    (
        r"x<1 \text{ or } x>3",
        [r"x < 1 \text{ or } x > 3", "x<1 or x>3", r"x > 3 \text{ or } x < 1"],
        [r"x<1 \text{ and } x>3", "x<1 and x>3", r"x>3 \text{ and } x<1", r"x<1 \land x>3", r"x<1 \text{ or } x>4"],
    ),
    (
        r"2 \mod 5",
        [r"2 \mod 5", "2 mod 5", r"2 \pmod 5", r"2 \bmod{5}", r"2 \text{ mod } 5"],
        [r"2 \mod 7", "2 mod 7", r"2 \pmod{7}", r"3 \mod 5"],
    ),
    (
        r"x \equiv 2 \pmod 5",
        [r"x\equiv 2\pmod{5}", r"2 \pmod 5", r"x \equiv 2 \ (\text{mod } 5)"],
        [r"x \equiv 2 \pmod 7", r"x \equiv 3 \pmod 5", r"y \equiv 2 \pmod 5", r"3 \pmod{5}"],
    ),
    (r"\angle ABC", [r"\angle ABC", r"\angle{ABC}"], [r"\angle ACB", r"\angle BAC", r"\angle ABD"]),
    ("BC", ["BC", r"B \cdot C", r"C \cdot B"], ["CB", "BD", "B+C"]),
    ("ABC", ["ABC"], ["ACB", "ABD"]),
    ("AB + CD", ["CD + AB"], ["AB + CE"]),
    (
        "12:30 pm",
        ["12:30 pm", r"12:30 \text{ p.m.}", "12:30 PM", r"12{:}30\text{ pm}"],
        ["12:30 am", r"12:30 \text{ a.m.}", "12:31 pm", "1:30 pm"],
    ),
    (r"5\text{ p.m.}", [r"5 \text{ pm}", "5 pm"], [r"5\text{ a.m.}", "6 pm"]),
    (
        r"\langle 3,-1,2\rangle",
        [r"\left\langle 3, -1, 2 \right\rangle", "(3,-1,2)", r"\langle 3, -1, \frac{4}{2} \rangle"],
        [r"\langle -1,2,3\rangle", "(-1,2,3)", r"\langle 3,-1\rangle", r"\{3,-1,2\}"],
    ),
    (r"\langle 1,2,2\rangle", [r"\langle 1, 2, 2 \rangle"], [r"\langle 1,2\rangle", r"\langle 2,1,2\rangle", "(1,2)"]),
    (
        r"\begin{pmatrix*}[r] 1 & 2 \\ 3 & 4 \end{pmatrix*}",
        [
            r"\begin{pmatrix*}[r]1&2\\3&4\end{pmatrix*}",
            r"\begin{pmatrix*}1&2\\3&4\end{pmatrix*}",
            r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
            r"\pmatrix{1&2\cr3&4}",
        ],
        [r"\begin{pmatrix*}[r] 1 & 3 \\ 2 & 4 \end{pmatrix*}", r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}"],
    ),
    (
        r"\pmatrix{1 & 2 \cr 3 & 4}",
        [
            r"\pmatrix{1&2\cr3&4}",
            r"\pmatrix{1&2\cr 3&4\cr}",
            r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
            r"\pmatrix{1&\frac{4}{2}\cr3&4}",
        ],
        [r"\pmatrix{1&3\cr2&4}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"],
    ),
    (
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}_{2\times 2}",
        [r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}_{2 \times 2}"],
        [r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}_{2\times 2}"],
    ),
    (
        r"2\begin{pmatrix*}[r] 1 & 2 \\ 3 & 4 \end{pmatrix*}",
        [r"\begin{pmatrix*}[r] 2 & 4 \\ 6 & 8 \end{pmatrix*}", r"2\pmatrix{1&2\cr3&4}"],
        [r"2\begin{pmatrix*}[r] 1 & 3 \\ 2 & 4 \end{pmatrix*}"],
    ),
    (
        r"101 \text{ (base 2)}",
        [r"101\text{ (base 2)}", "101_2", r"101_{\text{two}}"],
        [r"101 \text{ (base 3)}", "101_3", "101"],
    ),
    (
        r"3\mathbf{i}-2\mathbf{j}",
        [r"-2\mathbf{j}+3\mathbf{i}", r"3\mathbf{i} - 2\mathbf{j}"],
        [r"3\mathbf{i}+2\mathbf{j}", r"2\mathbf{i}-3\mathbf{j}", "3"],
    ),
    (r"2\mathrm{e}^{3}", ["2e^3", r"2 \mathrm{e}^3"], ["2", r"2\mathrm{e}^{5}", "2e^5"]),
    (r"2\mathbf{A}", ["2A"], ["2", r"2\mathbf{B}"]),
    (
        r"2\text{ h }30\text{ min}",
        [r"2\text{ h } 30\text{ min}", "2 h 30 min"],
        ["2", r"2\text{ h }31\text{ min}", r"2\text{ h}", "230"],
    ),
    (r"5\text{ to }1", [r"5 \text{ to } 1"], ["5", r"1\text{ to }5", "51"]),
    ("2024-01-15", ["2024-01-15"], ["2024-15-01", "2008", "2024-01-16"]),
    ("12/25/2024", ["12/25/2024"], ["25/12/2024", r"\frac{12}{25 \cdot 2024}"]),
    ("1.2.3", ["1.2.3"], ["1.2", "0.36", "1.2.4"]),
    ("3!!", ["3!!", "3"], ["720", "6", "3!"]),
    (
        r"\frac{dy}{dx}=2x",
        [r"\frac{dy}{dx} = x + x", r"\dfrac{dy}{dx}=2x"],
        [r"\frac{dx}{dy}=2x", r"\frac{dy}{dx}=3x", r"\frac{dz}{dx}=2x"],
    ),
    (
        r"\frac{\partial f}{\partial x}",
        [r"\dfrac{\partial f}{\partial x}"],
        [r"\frac{\partial f}{\partial y}", r"\frac{\partial x}{\partial f}", "0"],
    ),
    (r"x \in \{1,2\}", [r"\{2,1\}", r"x \in \{2, 1\}"], [r"\{1,3\}", "1", r"y \in \{1,2\}"]),
    ("8{:}30", ["8:30"], ["8", "8:31", "30"]),
    ("101₂", ["101_2", "101₂"], ["101_3", "101₃", "101"]),
    ("0.625…", ["0.625", r"0.625\ldots"], ["0.62"]),
]
"""Answers of which Math-Verify loses the order or a word."""


@pytest.mark.parametrize(("gold", "equal", "different"), MISREAD, ids=[gold for gold, _, _ in MISREAD])
async def test_accuracy_keeps_the_order_and_the_words_that_math_verify_loses(
    gold: str, equal: list[str], different: list[str]
) -> None:
    modes: list[dict[str, Any]] = [{}, {"extract": "anywhere"}]
    for options in modes:
        assert [text for text in equal if await accuracy(rf"\boxed{{{text}}}", gold, **options) != 1.0] == []
        assert [text for text in different if await accuracy(rf"\boxed{{{text}}}", gold, **options) != 0.0] == []


def test_answers_that_agree_without_algebra_have_one_canonical_form() -> None:
    for same in (
        ("1:2:3", "1 : 2 : 3.0"),
        (r"2 \mod 5", r"2 \pmod{5}", r"x \equiv 2 \pmod 5"),
        ("12:30 pm", r"12:30 \text{ P.M.}"),
        (r"\langle 1, 2 \rangle", "(1,2.0)"),
        (r"\pmatrix{1&2\cr3&4}", r"\begin{pmatrix*}[r]1&2\\3&4\end{pmatrix*}"),
    ):
        assert len({canonical_answer(text) for text in same}) == 1, same


@pytest.mark.parametrize(
    ("gold", "text"),
    [("3.5", "3.49999999"), ("0.1", "0.1000001"), ("3.14159265358979323846", "3.14159265358979323847")],
)
async def test_only_extract_anywhere_rounds_to_six_places_as_math_verify(gold: str, text: str) -> None:
    assert await accuracy(rf"\boxed{{{text}}}", gold) == 0.0
    assert await accuracy(rf"\boxed{{{text}}}", gold, extract="anywhere") == 1.0


async def test_extract_anywhere_reads_bases_in_prose() -> None:
    assert await accuracy("The answer is 2516_8.", "2516_8", extract="anywhere") == 1.0
    assert await accuracy("The answer is 2516_9.", "2516_8", extract="anywhere") == 0.0
    assert await accuracy("The answer is 2516_9.", "2516", extract="anywhere") == 0.0
    assert await accuracy("So it is $2516_9$.", "2516_8", extract="anywhere") == 0.0


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        (r"1,2,\ldots,10", "1,2,10"),
        (r"\{2,4,6,\dots\}", r"\{2,4,6\}"),
        ("$5 million", "5"),
        ("5 dozen", "5"),
        (r"\ge 5", "5"),
        (r"5\text{ or more}", "5"),
    ],
)
async def test_an_answer_that_can_only_be_read_in_part_gives_no_score(gold: str, text: str) -> None:
    assert await accuracy(rf"\boxed{{{text}}}", gold) is None
    assert await accuracy(rf"\boxed{{{text}}}", gold, extract="anywhere") is None
