import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lpa.errors import LpaError
from lpa.tokens import LETTERS, Tokens


@given(st.text(alphabet="abcxyz' ", max_size=40))
def test_text_comes_back_through_ctc_labels(text):
    tokens = Tokens()
    labels = [label for i in tokens.encode(text) for label in (i, i, tokens.blank)]  # as CTC would stretch it
    assert tokens.decode(labels) == " ".join(text.split())


def test_decode_collapses_repeats_before_it_drops_blanks():
    tokens = Tokens()
    a, b = tokens.encode("ab")
    assert tokens.decode([a, a, 0, a, b, b]) == "aab"
    assert tokens.decode([1, 1, a, 1, 0, 1, b, 1]) == "a b"  # gaps at the edges and doubled ones leave no spaces
    assert tokens.decode([]) == ""


def test_upper_case_alphabet_with_markers():
    tokens = Tokens(("<pad>", "<s>", "</s>", "<unk>", "|", "A", "B"), 0, "|")
    assert tokens.encode("a b") == [5, 4, 6]
    assert tokens.decode([1, 5, 4, 3, 6, 2]) == "A B"


def test_space_as_word_gap():
    tokens = Tokens(("a", " ", "<pad>"), 2, " ")
    assert tokens.encode("a a") == [0, 1, 0]
    assert tokens.decode([0, 2, 1, 0]) == "a a"


def test_dict_round_trip():
    tokens = Tokens(("x", "_", "|"), 1, "|")
    assert Tokens.from_dict(tokens.to_dict()) == tokens
    assert Tokens() == Tokens(LETTERS, 0, "|")
    assert len(Tokens()) == 29


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Tokens().encode("naïve"), "'ï'"),
        (lambda: Tokens(("a", "a", "|"), 0), "'a' more than once"),
        (lambda: Tokens(("a", "|"), 2), "blank 2"),
        (lambda: Tokens(("a", "b"), 0), "word gap '|'"),
        (lambda: Tokens.from_dict({"symbols": ["a"]}), "blank, word_gap"),
    ],
)
def test_errors_name_the_thing(make, says):
    with pytest.raises(LpaError) as error:
        make()
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_imports_no_torch():
    code = "import sys, lpa.tokens; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
