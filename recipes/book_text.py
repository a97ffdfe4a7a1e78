"""More text for recipes/speak.py: lines out of books in plain text, said in several accents.

    python recipes/book_text.py BOOK.txt… [--books DIR] --voice DIR --apart FILE… --out DIR

BOOK.txt  running text; what stands between blank lines is a paragraph
--books   sentences.txt: its sentences too, in new accents
--voice   voice.json, which numbers the phonemes
--apart   transcripts (*.trans.txt) that no line may share seven words in a row with
--out     sentences.txt and phonemes.npz, as speak.py reads them, in random order

Lines end where a clause does and have 3 to 32 words. Needs numpy and piper-tts, whose phonemes the voice knows.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

WORD = re.compile(r"[a-z]+(?:'[a-z]+)*")
SHORT, LONG = 3, 32  # words a line
TITLES = {"Mr.": "mister", "Mrs.": "missus", "Dr.": "doctor", "St.": "saint", "Messrs.": "messieurs"}
ACCENTS = {"en-us": 0.66, "en-gb-x-rp": 0.2, "en-gb-x-gbclan": 0.06, "en-gb-scotland": 0.04, "en-us-nyc": 0.04}


def words(line: str) -> list[str]:
    return WORD.findall(line.lower())


def paragraphs(text: str) -> Iterator[str]:
    text = unicodedata.normalize("NFKD", text.translate({ord(a): "'" for a in "‘’"})).replace("—", " -- ")
    text = text.replace("_", "").replace("&", "and")
    for title, said in TITLES.items():
        text = text.replace(title, said)
    for paragraph in re.split(r"\n\s*\n", text):
        yield " ".join(paragraph.encode("ascii", "ignore").decode().split())


def lines(text: str, rng: random.Random) -> Iterator[str]:
    """Clauses, joined until there are as many words as are wanted this time."""
    kept: list[str] = []
    wanted = rng.randint(SHORT, LONG - 4)
    for clause in re.findall(r"[^.;:?!,]+(?:[.;:?!,]+['\")]*|$)", text):
        found = words(clause)
        strange = re.search(r"[^A-Za-z'\",.;:?!() -]", clause) or any(len(w) == 1 and w not in "aio" for w in found)
        if strange or len(found) > LONG or re.search(r"\b[A-Z]{2,}\b", clause):  # figures, initials, headings
            kept = []
            continue
        if sum(len(words(k)) for k in kept) + len(found) > LONG:
            kept = []
        kept.append(clause.strip())
        if sum(len(words(k)) for k in kept) >= wanted:
            yield " ".join(kept).strip("\"'(),;:- ").replace('"', "").replace("(", "").replace(")", "")
            kept, wanted = [], rng.randint(SHORT, LONG - 4)


def runs(found: list[str], size: int = 7) -> Iterator[tuple[str, ...]]:
    return (tuple(found[i : i + size]) for i in range(len(found) - size + 1))


def stay_apart(chosen: Iterable[str], transcripts: Iterable[Path]) -> list[str]:
    """The lines that share no seven words in a row with the transcripts."""
    apart = {run for path in transcripts for line in path.read_text().splitlines() for run in runs(words(line)[1:])}
    return [line for line in chosen if not any(run in apart for run in runs(words(line)))]


def pack(chosen: list[str], voice: Path, out: Path, accents: dict[str, float], rng: random.Random) -> None:
    """Write the lines and the phonemes they are said with, each in an accent of its own."""
    from piper.phoneme_ids import phonemes_to_ids
    from piper.phonemize_espeak import EspeakPhonemizer

    ids, phonemizer = json.loads((voice / "voice.json").read_text())["phoneme_id_map"], EspeakPhonemizer()
    rows = []
    for number, line in enumerate(chosen):
        accent = rng.choices(list(accents), list(accents.values()))[0]
        line = line if line[-1] in ".?!" else line + "."
        said = [p for part in phonemizer.phonemize(accent, line) for p in part]
        rows.append(np.array(phonemes_to_ids(said, ids), np.uint8))
        if number % 1000 == 0:
            print(f"\r{number} of {len(chosen)}", end="", file=sys.stderr)
    out.mkdir(parents=True, exist_ok=True)
    (out / "sentences.txt").write_text("".join(" ".join(words(line)) + "\n" for line in chosen))
    lens = np.array([len(row) for row in rows], np.int32)
    np.savez_compressed(out / "phonemes.npz", flat=np.concatenate(rows), lens=lens)
    heard = Counter(w for line in chosen for w in words(line))
    print(f"\n{len(chosen)} lines, {sum(heard.values())} words, {len(heard)} different", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--books", type=Path)
    for name in ("voice", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--apart", type=Path, nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    found = {line for t in options.texts for p in paragraphs(t.read_text()) for line in lines(p, rng)}
    if options.books:
        found |= set((options.books / "sentences.txt").read_text().splitlines())
    chosen = stay_apart(sorted(found), options.apart)
    rng.shuffle(chosen)
    pack(chosen, options.voice, options.out, ACCENTS, rng)
    return 0


if __name__ == "__main__":
    sys.exit(main())
