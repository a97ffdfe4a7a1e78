"""More text for recipes/speak.py: lines out of two free dictionaries, for the words that books seldom use.

    python recipes/dictionary_text.py --gcide FILE --wordnet FILE --books DIR --voice DIR --apart FILE… --out DIR

--gcide, --wordnet  databases of Debian's dict-gcide and dict-wn
--books   sentences.txt: a third of the lines are its sentences with some words exchanged for those of the dictionaries
--voice   voice.json, which numbers the phonemes
--apart   transcripts (*.trans.txt) that no line may share seven words in a row with
--out     sentences.txt and phonemes.npz, as speak.py reads them, in random order

Definitions and quotations, 5 to 24 words a line. Needs numpy and piper-tts, whose phonemes the voice was trained with.
"""

from __future__ import annotations

import argparse
import gzip
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from book_text import pack, stay_apart, words

SHORT, LONG = 5, 24  # words a line


def entries(path: Path, quoted: bool) -> Iterator[str]:
    """Running text of a dictionary, a paragraph at a time."""
    paragraph: list[str] = []
    for line in [*gzip.decompress(path.read_bytes()).decode("utf-8", "replace").splitlines(), ""]:
        if line.startswith(" ") and line.strip():
            paragraph.append(line.strip())
            continue
        if paragraph:
            text = " ".join(paragraph)
            text = re.sub(r"\[[^\]]*\]|\([^)]*\)|\\[^\\]*\\", " ", text)  # origins, fields, pronunciations
            text = re.sub(r"--\s?[A-Z][\w. ]*", ". ", text)  # who is quoted
            text = re.sub(r"(?:^|\s)(?:Syn|Note|[nv]|adj|adv)?\s*\d*[.:]\s", ". ", text) if quoted else text
            yield text.replace("{", "").replace("}", "")
        paragraph = []


def lines(text: str) -> Iterator[str]:
    """Whole stretches between full stops and semicolons, joined until there are words enough."""
    kept: list[str] = []
    for part in re.split(r"[.;:?!\"]+\s*", text):
        found = words(part)
        strange = re.search(r"[^A-Za-z', -]", part) or any(len(w) == 1 and w not in "aio" for w in found)
        if not found or strange or len(found) > LONG:
            kept = []
            continue
        kept.append(part.strip(" ,-"))
        count = sum(len(words(k)) for k in kept)
        if count >= SHORT:
            if count <= LONG:
                yield ", ".join(kept)
            kept = []


def exchanged(sentence: str, others: list[str], rng: random.Random) -> str:
    """A sentence with a quarter of its longer words exchanged."""
    return " ".join(rng.choice(others) if len(w) > 3 and rng.random() < 0.25 else w for w in sentence.split())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("gcide", "wordnet", "books", "voice", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--apart", type=Path, nargs="*", default=[])
    parser.add_argument("--count", type=int, default=90_000, help="lines")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    books = (options.books / "sentences.txt").read_text().splitlines()
    kinds = [
        sorted({line for text in entries(path, path == options.wordnet) for line in lines(text)})
        for path in (options.gcide, options.wordnet)
    ]
    spoken = Counter(w for kind in kinds for line in kind for w in set(words(line)))
    others = [w for w in spoken if len(w) > 3]
    kinds.append([exchanged(sentence, others, rng) for sentence in books])
    chosen = [line for kind in kinds for line in rng.sample(kind, min(len(kind), options.count // len(kinds)))]
    chosen = stay_apart(chosen, options.apart)
    rng.shuffle(chosen)
    pack([line.lower() for line in chosen], options.voice, options.out, {"en-us": 1.0}, rng)
    return 0


if __name__ == "__main__":
    sys.exit(main())
